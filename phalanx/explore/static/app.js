// The page: sends what somebody does, and puts what comes back in its places. It computes no number.

import { Card } from "./card.js";
import { Live } from "./live.js";
import { runs } from "./runs.js";
import { scrubbers } from "./scrub.js";
import { ask, search } from "./source.js";
import { forget, timelines } from "./timeline.js";
import { tour } from "./tour.js";

const RESTS = 350; // milliseconds after which keys count as one change
/** @type {Record<string, string>} */ const ICONS = { good: "✓", bad: "✕", note: "→" };
const body = document.body;
const say = /** @type {HTMLElement} */ (document.getElementById("said"));
const notice = /** @type {HTMLElement} */ (document.getElementById("notice"));
const card = new Card(/** @type {HTMLElement} */ (document.getElementById("card")));

/** @type {Map<string, HTMLElement[]>} */ const places = new Map();
const page = {
  state: location.search.slice(1) || body.dataset.query || "",
  see: new Set(), // panels on the screen
  open: new Set(), // tables that are open
  /** @type {string[]} */ undo: [],
  /** @type {string[]} */ redo: [],
  /** @type {string | null} */ pin: null,
  /** @type {{key: string, base: string, steps: number, at: number} | null} */ held: null,
};

function index() {
  for (const [kind, attribute] of [["i", "k"], ["r", "r"], ["w", "w"], ["p", "p"], ["t", "tt"]]) {
    for (const found of document.querySelectorAll(`[data-${attribute}]`)) {
      const element = /** @type {HTMLElement} */ (found);
      const id = kind + element.dataset[attribute];
      places.set(id, [...(places.get(id) || []), element]);
    }
  }
}

/** @param {any} extra @param {string | undefined} base where an edit begins; else the state when it is sent */
function request(extra = {}, base = undefined) {
  const asked = { state: base, see: [...page.see], open: [...page.open], ...extra };
  if (card.id) asked.why = card.id;
  if (page.pin !== null) asked.pin = page.pin;
  live.send(asked);
}

/** @param {any} reply */
function apply(reply) {
  if (reply.error) return void (notice.textContent = reply.error);
  if ("n" in reply) page.state = reply.state;
  draw(reply);
  if (!("n" in reply)) return;
  for (const [key, [text, plain]] of Object.entries(reply.inputs)) put(key, text, plain);
  if (reply.problems.length) notice.textContent = reply.problems.join("; ");
  else if (notice.textContent && page.held) notice.textContent = "";
  if (reply.flips.length) say.textContent = reply.flips.slice(0, 2).join(". ");
  if (reply.card) card.show(reply.card);
  if (reply.pins) pinned(reply.pins);
  document.dispatchEvent(new CustomEvent("phalanx:reply", { detail: reply }));
}

/** Put records, pictures and tables in their places. @param {any} reply */
function draw(reply) {
  for (const [id, [text, verdict, why]] of Object.entries(reply.records)) face(id, text, verdict, why);
  for (const [id, html] of Object.entries(reply.pictures)) for (const place of places.get("p" + id) || []) {
    if (html.includes("<canvas")) timelines(page.state, place, html);
    else {
      forget(place);
      if (!stands(place, html)) place.innerHTML = html;
    }
  }
  for (const [id, html] of Object.entries(reply.tables)) for (const place of places.get("t" + id) || []) place.innerHTML = html;
}

/** @type {WeakSet<HTMLElement>} */ const replaced = new WeakSet();

/** Whether the document came with it: then what somebody typed meanwhile stays. @param {HTMLElement} place @param {string} html */
function stands(place, html) {
  if (replaced.has(place)) return false;
  replaced.add(place);
  const made = document.createElement("template");
  made.innerHTML = html;
  return made.innerHTML === place.innerHTML;
}

/** @param {string} key @param {string} text @param {string} plain */
function put(key, text, plain) {
  for (const place of places.get("i" + key) || []) {
    if (place instanceof HTMLSelectElement || place instanceof HTMLInputElement) {
      if (document.activeElement !== place || place instanceof HTMLSelectElement) place.value = plain;
      continue;
    }
    place.textContent = text;
    place.setAttribute("aria-valuenow", plain);
    place.setAttribute("aria-valuetext", text);
  }
}

/** @param {string} id @param {string} text @param {string} verdict @param {string} why */
function face(id, text, verdict, why) {
  for (const place of places.get("r" + id) || []) {
    if (!("v" in place.dataset)) {
      place.textContent = text;
      continue;
    }
    place.className = `v ${verdict}`;
    place.children[0].textContent = ICONS[verdict] || "";
    place.children[1].textContent = text;
  }
  for (const place of places.get("w" + id) || []) place.textContent = why;
}

/** @param {Record<string, string>} was */
function pinned(was) {
  for (const place of document.querySelectorAll("[data-was]")) place.removeAttribute("data-was");
  for (const [id, text] of Object.entries(was)) for (const place of places.get("r" + id) || []) place.setAttribute("data-was", text);
}

// A change: many small moves from one base, then one entry of history.

/** @param {string} key */
function begin(key) {
  settle();
  page.held = { key, base: page.state, steps: 0, at: 0 };
}

/** @param {string} key @param {number} steps */
function move(key, steps) {
  if (!page.held) begin(key);
  if (page.held) page.held.steps = steps;
  request({ edit: { steps: [key, steps] } }, page.held ? page.held.base : page.state);
}

let resting = 0;
/** @param {string} key @param {number} steps */
function nudge(key, steps) {
  if (page.held?.key !== key) begin(key);
  move(key, (page.held ? page.held.steps : 0) + steps);
  clearTimeout(resting);
  resting = setTimeout(settle, RESTS);
}

/** End a change: remember where it began, and write the address. */
function settle() {
  clearTimeout(resting);
  const held = page.held;
  page.held = null;
  if (held) remember(held.base);
}

/** One entry of history, once every answer is there. @param {string} before */
async function remember(before) {
  await idle();
  if (before === page.state) return;
  page.undo.push(before);
  page.redo = [];
  address();
}

/** Wait until nothing is asked any more. */
async function idle() {
  while (live.waiting || live.next) await next();
}

function address() {
  history.replaceState(null, "", location.pathname + (page.state ? `?${page.state}` : "") + location.hash);
  for (const [name, entries] of [["undo", page.undo], ["redo", page.redo]]) {
    const button = document.querySelector(`[data-do="${name}"]`);
    if (button instanceof HTMLButtonElement) button.disabled = !entries.length;
  }
}

/** @param {any} edit */
function change(edit) {
  settle();
  const before = page.state;
  request({ edit });
  remember(before);
}

/** @param {string} query @param {string[]} from @param {string[]} to */
async function jump(query, from, to) {
  to.push(page.state);
  page.state = query;
  request();
  await idle();
  address();
}

/** A "Try": sets some inputs, then drags one. @param {string} script */
async function attempt(script) {
  settle();
  const before = page.state;
  const parts = script.split(";");
  const sets = parts.filter((part) => part.includes("=")).join(";");
  const drags = parts.filter((part) => !part.includes("="));
  if (sets) {
    request({ edit: { set: sets } });
    await idle();
  }
  for (const part of drags) {
    const [key, steps] = part.split(":");
    await drag(key, Number(steps));
  }
  remember(before);
}

/** @param {string} key @param {number} steps */
async function drag(key, steps) {
  const base = page.state, still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  for (const place of places.get("i" + key) || []) place.classList.add("held");
  const frames = still ? 1 : Math.min(Math.abs(steps), 40);
  for (let frame = 1; frame <= frames; frame += 1) {
    request({ edit: { steps: [key, Math.round((steps * frame) / frames)] } }, base);
    await idle();
    if (!still) await new Promise((done) => setTimeout(done, 1400 / frames));
  }
  for (const place of places.get("i" + key) || []) place.classList.remove("held");
}

/** The next reply, if one comes. @returns {Promise<void>} */
function next() {
  return new Promise((done) => {
    const over = setTimeout(done, 1500);
    document.addEventListener("phalanx:reply", () => (clearTimeout(over), done()), { once: true });
  });
}

/** @param {string} text @param {HTMLElement} button @param {string} what */
async function copy(text, button, what) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    say.textContent = `${what} copied`;
  } catch {
    notice.textContent = text; // without a clipboard it can still be read
  }
  setTimeout(() => (button.textContent = name), 1200);
}

/** @type {Record<string, (button: HTMLElement) => unknown>} */
const tools = {
  undo: () => page.undo.length && jump(/** @type {string} */ (page.undo.pop()), page.undo, page.redo),
  redo: () => page.redo.length && jump(/** @type {string} */ (page.redo.pop()), page.redo, page.undo),
  reset: () => {
    settle();
    page.undo.push(page.state);
    page.state = "";
    request();
    idle().then(address);
  },
  pin: (/** @type {HTMLElement} */ button) => {
    page.pin = page.pin === null ? page.state : null;
    button.setAttribute("aria-pressed", String(page.pin !== null));
    if (page.pin === null) pinned({});
    request();
  },
  link: (/** @type {HTMLElement} */ button) => copy(location.origin + location.pathname + (page.state ? `?${page.state}` : ""), button, "link"),
  command: async (/** @type {HTMLElement} */ button) => copy(await text("command"), button, "command"),
  tour: () => tour(/** @type {HTMLElement} */ (document.getElementById("card"))),
  search: () => plan(),
  stop: () => searching?.abort(),
  runfile: async (/** @type {HTMLElement} */ button) => copy(await text("run"), button, "run file"),
};

/** @type {AbortController | null} */ let searching = null;

/** Search layouts for this state; the page stays alive meanwhile. */
async function plan() {
  searching?.abort();
  const mine = (searching = new AbortController());
  const line = /** @type {HTMLElement} */ (document.getElementById("searching"));
  const stop = /** @type {HTMLElement} */ (document.querySelector('[data-do="stop"]'));
  const place = /** @type {HTMLElement} */ (document.getElementById("found"));
  stop.hidden = false;
  line.textContent = "searching";
  try {
    await search(page.state, mine.signal, (found) => told(found, line, place));
  } catch (error) {
    if (searching === mine) line.textContent = mine.signal.aborted ? "stopped" : String(error);
  }
  if (searching === mine) stop.hidden = true;
}

/** @param {any} found @param {HTMLElement} line @param {HTMLElement} place */
function told(found, line, place) {
  if (found.seconds !== undefined) line.textContent = `searching, ${found.seconds} s`;
  if (found.error) line.textContent = found.error;
  if (!found.html) return;
  line.textContent = "";
  place.innerHTML = found.html;
}

/** @param {string} what */
async function text(what) {
  const answer = await ask(`${what}?${page.state}`);
  return answer.text();
}

document.addEventListener("click", (event) => {
  const at = /** @type {Element} */ (event.target);
  const set = /** @type {HTMLElement | null} */ (at.closest("[data-set]"));
  const trial = /** @type {HTMLElement | null} */ (at.closest("[data-try]"));
  const tool = /** @type {HTMLElement | null} */ (at.closest("[data-do]"));
  const record = /** @type {HTMLElement | null} */ (at.closest("[data-r]"));
  if (set) {
    event.preventDefault();
    change({ set: set.dataset.set });
  } else if (trial) attempt(trial.dataset.try || "");
  else if (tool && tools[tool.dataset.do || ""]) tools[tool.dataset.do || ""](tool);
  else if (record && record !== card.of) {
    card.close();
    card.open(record);
    request();
  } else if (!at.closest("#card")) card.close();
});

document.addEventListener("change", (event) => {
  const field = event.target;
  if (!(field instanceof HTMLSelectElement || field instanceof HTMLInputElement) || !field.dataset.k) return;
  change({ typed: [field.dataset.k, field.value] });
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") card.close();
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLTextAreaElement;
  if (typing || !(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
  event.preventDefault();
  tools[event.shiftKey ? "redo" : "undo"](body);
});

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!(form instanceof HTMLFormElement) || !form.dataset.problem) return;
  event.preventDefault();
  const asked = new URLSearchParams({ problem: form.dataset.problem, answer: String(new FormData(form).get("answer") || "") });
  const grade = await (await ask(`grade?${asked}`)).json();
  const word = document.createElement("span"), why = document.createElement("span");
  word.className = `v ${grade.verdict}`;
  word.textContent = `${ICONS[grade.verdict] || ""} ${grade.text}`;
  why.className = "why";
  why.textContent = ` ${grade.reason}`;
  form.querySelector(".grade")?.replaceChildren(word, why);
});

document.addEventListener("toggle", (event) => {
  const details = event.target;
  if (!(details instanceof HTMLDetailsElement) || !details.dataset.t) return;
  if (details.open) page.open.add(details.dataset.t);
  else page.open.delete(details.dataset.t);
  if (details.open) request();
}, true);

// Dragging in a picture: the place it was taken at, as a fraction of the width.
document.addEventListener("pointerdown", (event) => {
  const handle = /** @type {Element} */ (event.target).closest("[data-drag]");
  const box = /** @type {HTMLElement | null} */ (handle?.closest("[data-p]"));
  const wide = handle?.closest("svg.plot")?.getBoundingClientRect();
  if (!handle || !box || !wide) return;
  const name = handle.getAttribute("data-drag"), base = page.state;
  const move = (/** @type {PointerEvent} */ to) => request({ edit: { drag: [name, (to.clientX - wide.left) / wide.width] } }, base);
  const stop = () => {
    removeEventListener("pointermove", move);
    removeEventListener("pointerup", stop);
    remember(base);
  };
  event.preventDefault();
  settle();
  addEventListener("pointermove", move);
  addEventListener("pointerup", stop);
});

const live = new Live(apply, (up) => {
  /** @type {HTMLElement} */ (document.getElementById("offline")).hidden = up;
  if (up) body.dataset.ready = "";
}, () => page.state);
index();
scrubbers(body, {
  begin, move, nudge, end: settle,
  cancel: () => {
    if (!page.held) return;
    page.state = page.held.base;
    page.held = null;
    request();
  },
  type: (key, text) => change({ typed: [key, text] }),
  edge: (key, side) => change({ edge: [key, side] }),
});

const watched = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const name = entry.target.id;
    if (entry.isIntersecting) page.see.add(name);
    else page.see.delete(name);
  }
  request();
}, { rootMargin: "150px" });
for (const part of document.querySelectorAll(".part")) watched.observe(part);

const here = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const link of document.querySelectorAll(".contents a")) link.classList.toggle("here", link.getAttribute("href") === `#${entry.target.id}`);
  }
}, { rootMargin: "-20% 0px -70% 0px" });
for (const part of document.querySelectorAll(".part")) here.observe(part);
runs((name) => page.see.has(name));
