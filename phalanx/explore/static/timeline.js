// Timelines of many cells: binary columns, on a canvas.

import { ask } from "./source.js";

const NAMES = ["f", "f2", "b", "b2", "i", "i2", "w", "w2"];
const ROW = 18, CURVE = 11;

/** @param {string} state @param {ParentNode} where */
export function timelines(state, where) {
  for (const found of where.querySelectorAll("canvas[data-timeline]")) {
    const canvas = /** @type {HTMLCanvasElement} */ (found);
    ask(`timeline?of=${canvas.dataset.timeline}&${state}`).then((answer) => answer.arrayBuffer()).then((columns) => draw(canvas, columns));
  }
}

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
