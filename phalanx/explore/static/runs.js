// Run directories: what is ticked is shown, and read again while the part is on the screen.

import { ask } from "./source.js";

const EVERY = 3000; // milliseconds

/** @param {(name: string) => boolean} seen */
export function runs(seen) {
  const list = /** @type {HTMLElement} */ (document.getElementById("runlist"));
  const view = /** @type {HTMLElement} */ (document.getElementById("runview"));
  /** @type {string[] | null} */ let chosen = null;
  let drawn = "";

  async function read() {
    const asked = chosen ? chosen.map((run) => `run=${run}`).join("&") || "run=none" : "";
    const answer = await ask(`runs?${asked}`);
    const text = await answer.text();
    if (text === drawn) return;
    drawn = text;
    const found = JSON.parse(text);
    const at = document.activeElement instanceof HTMLInputElement ? document.activeElement.dataset.run : undefined;
    list.innerHTML = found.list;
    view.innerHTML = found.view;
    if (at) /** @type {HTMLElement | null} */ (list.querySelector(`[data-run="${at}"]`))?.focus();
  }

  list.addEventListener("change", () => {
    chosen = [...list.querySelectorAll("input:checked")].map((box) => /** @type {HTMLElement} */ (box).dataset.run || "");
    read();
  });
  let first = true;
  const look = () => {
    if (seen("runs") && !document.hidden) {
      first = false;
      read().catch(() => {});
    }
    setTimeout(look, first ? 200 : EVERY);
  };
  look();
}
