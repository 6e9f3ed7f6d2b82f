// One connection, one request in flight, the newest state wins.

import { connect } from "./source.js";

export class Live {
  /** @param {(reply: any) => void} apply @param {(up: boolean) => void} online @param {() => string} state */
  constructor(apply, online, state) {
    this.apply = apply;
    this.state = state; // as it is when a request leaves
    this.online = online;
    /** @type {any} */ this.next = null;
    this.waiting = false;
    this.number = 0;
    this.wait = 250;
    this.open();
  }

  open() {
    this.socket = connect();
    this.socket.addEventListener("open", () => {
      this.wait = 250;
      this.waiting = false;
      this.online(true);
      this.pump();
    });
    this.socket.addEventListener("message", (event) => {
      const reply = JSON.parse(/** @type {MessageEvent} */ (event).data);
      if ("n" in reply || "error" in reply) this.waiting = false; // else: what took longer
      this.apply(reply);
      this.pump();
    });
    this.socket.addEventListener("close", () => {
      this.online(false);
      setTimeout(() => this.open(), this.wait);
      this.wait = Math.min(this.wait * 2, 8000);
    });
  }

  /** An edit that waits is not lost to a request without one. @param {any} request */
  send(request) {
    const waits = this.next?.edit && !request.edit ? { edit: this.next.edit, state: this.next.state } : {};
    this.next = { ...request, ...waits };
    this.pump();
  }

  pump() {
    if (this.waiting || !this.next || this.socket?.readyState !== WebSocket.OPEN) return;
    this.number += 1;
    this.socket.send(JSON.stringify({ n: this.number, ...this.next, state: this.next.state ?? this.state() }));
    this.next = null;
    this.waiting = true;
  }
}
