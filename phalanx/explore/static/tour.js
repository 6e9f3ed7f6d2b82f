// A tour of five minutes: where to look, and what to do there.

const STOPS = [
  [".machine", "This line is always here: a model, a chip, the batch, and how many ways each axis cuts. Drag a number left or right, use the arrow keys, or press Enter and type 3M, 28672 or 2^14."],
  ["#notation .r", "Numbers with a thin line follow from the others. Click one: it says its formula, its numbers and its source."],
  ["#clocks .picture", "Two clocks run at once in every layer. Whatever shows of the network beyond the arithmetic is time lost. Most of this page is about that."],
  ["#clocks [data-try]", "“Try” buttons do what the chapter asks of its reader. They can be undone."],
  ["#tensor .v", "A verdict is a word, an icon and a colour, and always has a reason beside it."],
  ["#pipeline .two", "Any two schedules side by side, with unequal costs, and what is in flight below each rank."],
  ["#problems .problem", "Problems are graded, and wrong answers told what they seem to be."],
  ["#plan .asking", "The question that matters: which layout, on how many chips? “Plan it” looks at all of them, ranks them, and says why not yours. Load brings a layout into every picture of the page."],
  [".tools", "Pin keeps today's numbers beside tomorrow's. The address holds everything: copy it, or the command, or the run file."],
];

/** @param {HTMLElement} card */
export function tour(card) {
  let at = -1;
  const note = document.createElement("div");
  note.className = "card tour";
  note.setAttribute("role", "dialog");
  note.setAttribute("aria-label", "Tour");
  card.after(note);
  const end = () => {
    note.remove();
    document.removeEventListener("keydown", keys);
    document.querySelector(".toured")?.classList.remove("toured");
  };
  const keys = (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && end();
  const go = (/** @type {number} */ next) => {
    at = next;
    document.querySelector(".toured")?.classList.remove("toured");
    const [where, text] = STOPS[at];
    const target = document.querySelector(where);
    if (!target) return end();
    target.classList.add("toured");
    target.scrollIntoView({ block: "center" });
    const line = document.createElement("p"), row = document.createElement("p");
    line.textContent = text;
    row.append(button(at + 1 < STOPS.length ? `Next (${at + 1} of ${STOPS.length})` : "Done", () => (at + 1 < STOPS.length ? go(at + 1) : end())));
    if (at) row.append(button("Back", () => go(at - 1)));
    row.append(button("End", end));
    note.replaceChildren(line, row);
    /** @type {HTMLElement} */ (row.firstElementChild).focus({ preventScroll: true });
  };
  document.addEventListener("keydown", keys);
  go(0);
}

/** @param {string} text @param {() => void} press */
function button(text, press) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "try";
  made.textContent = text;
  made.addEventListener("click", press);
  return made;
}
