// Where answers come from in a page without a server: Python, in a worker of this browser.

const HOME = new URL("worker.js", import.meta.url);
const BEAT = 200; // milliseconds between two signs of life

/** A worker and what is asked of it. */
class Python extends EventTarget {
  constructor() {
    super();
    this.readyState = /** @type {number} */ (WebSocket.CONNECTING);
    /** @type {Map<number, (answer: Response) => void>} */ this.asked = new Map();
    this.count = 0;
    this.worker = new Worker(HOME, { type: "module" });
    this.worker.onmessage = (event) => this.hear(event.data);
    this.worker.onerror = (event) => this.hear({ failed: event.message || "Python could not be started" });
  }

  /** @param {any} said */
  hear(said) {
    if (said.ready) {
      this.readyState = WebSocket.OPEN;
      this.dispatchEvent(new Event("open"));
    } else if (said.failed) this.dispatchEvent(new CustomEvent("failed", { detail: said.failed }));
    else if (said.live) this.dispatchEvent(new MessageEvent("message", { data: said.live }));
    else this.asked.get(said.id)?.(new Response(said.body, { status: said.status }));
  }

  /** A live message, as a socket takes it. @param {string} text */
  send(text) {
    this.worker.postMessage({ live: text });
  }

  /** @param {string} what @returns {Promise<Response>} */
  ask(what) {
    this.count += 1;
    const id = this.count;
    return new Promise((done) => {
      this.asked.set(id, (answer) => (this.asked.delete(id), done(answer)));
      this.worker.postMessage({ id, ask: what });
    });
  }
}

const python = new Python();
const offline = /** @type {HTMLElement} */ (document.getElementById("offline"));
offline.hidden = false;
python.addEventListener("failed", (event) => {
  offline.classList.add("bad");
  offline.textContent = `Python could not be started, so numbers stay as they are: ${/** @type {CustomEvent} */ (event).detail}`;
});
python.addEventListener("open", async () => {
  const said = await (await python.ask(`notice?${location.search.slice(1)}`)).text();
  /** @type {HTMLElement} */ (document.getElementById("notice")).innerHTML = said;
});

/** @param {string} what a name and a query */
export function ask(what) {
  return python.ask(what);
}

/** Where live messages go. */
export function connect() {
  return python;
}

/** A search in a worker of its own, so that the page moves on and it can be ended. @param {string} query @param {AbortSignal} signal @param {(found: any) => void} told */
export async function search(query, signal, told) {
  const own = new Python(), begun = performance.now();
  const beat = setInterval(() => told({ seconds: ((performance.now() - begun) / 1000).toFixed(1) }), BEAT);
  try {
    const stopped = new Promise((_, stop) => signal.addEventListener("abort", () => stop(new Error("stopped"))));
    const failed = new Promise((_, stop) => own.addEventListener("failed", (event) => stop(new Error(/** @type {CustomEvent} */ (event).detail))));
    const answer = await Promise.race([own.ask(`plan?${query}`), stopped, failed]);
    told(await /** @type {Response} */ (answer).json());
  } finally {
    clearInterval(beat);
    own.worker.terminate();
  }
}
