// Timelines of many cells: binary columns, on a canvas.

import { ask } from "./source.js";

const NAMES = ["f", "f2", "b", "b2", "i", "i2", "w", "w2"];
const ROW = 18, CURVE = 11;

/** @type {WeakMap<HTMLElement, string>} */ const wanted = new WeakMap();
/** @type {Map<HTMLCanvasElement, ArrayBuffer>} */ const drawn = new Map();

/** Put a picture with a canvas in its place once its columns are there, so that nothing flickers.
 * @param {string} state @param {HTMLElement} place @param {string} html */
export async function timelines(state, place, html) {
  wanted.set(place, html);
  const made = document.createElement("div");
  made.innerHTML = html;
  const canvas = /** @type {HTMLCanvasElement} */ (made.querySelector("canvas[data-timeline]"));
  const answer = await ask(`timeline?of=${canvas.dataset.timeline}&${state}`);
  if (!answer.ok || wanted.get(place) !== html) return; // a newer one is on its way
  const columns = await answer.arrayBuffer();
  if (wanted.get(place) !== html) return;
  place.replaceChildren(...made.childNodes);
  for (const old of drawn.keys()) if (!old.isConnected) drawn.delete(old);
  drawn.set(canvas, columns);
  draw(canvas, columns);
}

/** A picture without a canvas came: what is on its way is too late. @param {HTMLElement} place */
export function forget(place) {
  wanted.delete(place);
}

const again = () => requestAnimationFrame(() => drawn.forEach((columns, canvas) => canvas.isConnected && draw(canvas, columns)));
addEventListener("resize", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);

/** @param {HTMLCanvasElement} canvas @param {ArrayBuffer} columns */
function draw(canvas, columns) {
  const [ranks, cells, changes, most] = new Uint32Array(columns, 0, 4);
  const reals = new Float32Array(columns, 16, 2 * cells + changes);
  const whole = new Uint16Array(columns, 16 + reals.byteLength, 2 * cells + 2 * changes);
  const dense = devicePixelRatio || 1, wide = canvas.clientWidth, high = ranks * (ROW + CURVE);
  canvas.width = wide * dense;
  canvas.height = high * dense;
  canvas.style.height = `${high}px`;
  const paint = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  if (!paint) return;
  paint.scale(dense, dense);
  const colours = NAMES.map((name) => style.getPropertyValue(`--${name}`));
  for (let at = 0; at < cells; at += 1) {
    paint.fillStyle = colours[whole[cells + at]];
    paint.fillRect(reals[at] * wide, whole[at] * (ROW + CURVE), Math.max(reals[cells + at] * wide - 0.3, 0.3), ROW - 2);
  }
  paint.fillStyle = style.getPropertyValue("--activations");
  paint.globalAlpha = 0.5;
  for (let at = 0; at < changes; at += 1) {
    const rank = whole[2 * cells + at], level = whole[2 * cells + changes + at];
    const last = at + 1 === changes || whole[2 * cells + at + 1] !== rank;
    const from = reals[2 * cells + at] * wide, to = last ? from : reals[2 * cells + at + 1] * wide;
    const tall = ((CURVE - 2) * level) / most;
    paint.fillRect(from, (rank + 1) * (ROW + CURVE) - 2 - tall, to - from, tall);
  }
}
