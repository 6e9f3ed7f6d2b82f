// Numbers that can be dragged, nudged with keys, or typed.

const PIXELS = 6; // of a step

/**
 * @param {HTMLElement} root
 * @param {{nudge: (key: string, steps: number) => void, begin: (key: string) => void, move: (key: string, steps: number) => void,
 *   end: () => void, cancel: () => void, type: (key: string, text: string) => void, edge: (key: string, side: string) => void}} to
 */
export function scrubbers(root, to) {
  root.addEventListener("pointerdown", (event) => {
    const scrub = target(event);
    if (!scrub || event.button !== 0) return;
    begin(scrub, event, to);
  });
  root.addEventListener("dblclick", (event) => {
    const scrub = target(event);
    if (scrub) box(scrub, to);
  });
  root.addEventListener("keydown", (event) => {
    const scrub = target(event);
    if (scrub) keys(scrub, event, to);
  });
}

/** @param {Event} event @returns {HTMLElement | null} */
function target(event) {
  return event.target instanceof Element ? event.target.closest(".scrub") : null;
}

/** @param {HTMLElement} scrub @param {PointerEvent} down @param {any} to */
function begin(scrub, down, to) {
  const key = scrub.dataset.k;
  let moved = false, last = 0;
  const move = (/** @type {PointerEvent} */ event) => {
    const fine = event.shiftKey ? 4 : 1;
    const steps = Math.round((event.clientX - down.clientX) / (PIXELS * fine * (binary(scrub) ? 4 : 1)));
    if (!moved && Math.abs(event.clientX - down.clientX) < 3) return;
    if (!moved) to.begin(key);
    moved = true;
    if (steps !== last) to.move(key, (last = steps));
  };
  const stop = (/** @type {Event} */ event) => {
    scrub.removeEventListener("pointermove", move);
    scrub.removeEventListener("pointerup", stop);
    scrub.removeEventListener("pointercancel", stop);
    removeEventListener("keydown", escape);
    scrub.classList.remove("held");
    if (!moved) return;
    if (event.type === "pointerup") to.end();
    else to.cancel();
  };
  const escape = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    stop(event);
    event.stopPropagation();
  };
  scrub.setPointerCapture(down.pointerId);
  scrub.classList.add("held");
  scrub.addEventListener("pointermove", move);
  scrub.addEventListener("pointerup", stop);
  scrub.addEventListener("pointercancel", stop);
  addEventListener("keydown", escape);
}

/** Few values lie on a binary scale: they stand further apart. @param {HTMLElement} scrub */
function binary(scrub) {
  return scrub.dataset.scale === "binary";
}

/** @param {HTMLElement} scrub @param {KeyboardEvent} event @param {any} to */
function keys(scrub, event, to) {
  const key = scrub.dataset.k;
  const steps = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (steps) to.nudge(key, binary(scrub) ? Math.sign(steps) * Math.min(Math.abs(steps), 3) : steps);
  else if (event.key === "Home") to.edge(key, "low");
  else if (event.key === "End") to.edge(key, "high");
  else if (event.key === "Enter" || /^[0-9]$/.test(event.key)) box(scrub, to, event.key.length === 1 ? event.key : "");
  else return;
  event.preventDefault();
}

/** A box for what one types: 3M, 28672, 2^14. @param {HTMLElement} scrub @param {any} to @param {string} first */
function box(scrub, to, first = "") {
  const key = scrub.dataset.k;
  const field = document.createElement("input");
  field.className = "typing";
  field.value = first || scrub.getAttribute("aria-valuenow") || "";
  field.setAttribute("aria-label", scrub.getAttribute("aria-label") || "");
  let over = false;
  const close = (/** @type {boolean} */ take, /** @type {boolean} */ back) => {
    if (over) return;
    over = true;
    field.remove();
    scrub.hidden = false;
    if (take) to.type(key, field.value);
    if (back) scrub.focus();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") close(true, true);
    if (event.key === "Escape") close(false, true);
    if (event.key === "Enter" || event.key === "Escape") event.preventDefault();
    event.stopPropagation();
  });
  field.addEventListener("blur", () => close(true, false));
  scrub.after(field);
  scrub.hidden = true;
  field.focus();
  if (!first) field.select();
}
