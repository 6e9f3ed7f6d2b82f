// One socket, one request in flight, the newest state wins.

export class Live {
  /** @param {(reply: any) => void} apply @param {(up: boolean) => void} online */
  constructor(apply, online) {
    this.apply = apply;
    this.online = online;
    /** @type {any} */ this.next = null;
    this.waiting = false;
    this.number = 0;
    this.wait = 250;
    this.open();
  }

  open() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}/api/v1/live`);
    this.socket.addEventListener("open", () => {
      this.wait = 250;
      this.waiting = false;
      this.online(true);
      this.pump();
    });
    this.socket.addEventListener("message", (event) => {
      const reply = JSON.parse(event.data);
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

  /** @param {any} request */
  send(request) {
    this.next = request;
    this.pump();
  }

  pump() {
    if (this.waiting || !this.next || this.socket?.readyState !== WebSocket.OPEN) return;
    this.number += 1;
    this.socket.send(JSON.stringify({ n: this.number, ...this.next }));
    this.next = null;
    this.waiting = true;
  }
}
