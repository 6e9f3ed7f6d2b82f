// The card that says where a number comes from.

const ROWS = [["formula", "formula"], ["numbers", "substituted"], ["value", "value"], ["why", "reason"], ["source", "source"], ["name", "id"]];

export class Card {
  /** @param {HTMLElement} card */
  constructor(card) {
    this.card = card;
    /** @type {HTMLElement | null} */ this.of = null;
  }

  /** The record that is shown, if any. */
  get id() {
    return this.of ? this.of.dataset.r : undefined;
  }

  /** @param {HTMLElement} button */
  open(button) {
    this.of = button;
    this.card.replaceChildren();
  }

  close() {
    if (!this.of) return;
    this.of.focus({ preventScroll: true });
    this.of = null;
    this.card.hidden = true;
  }

  /** @param {any} record */
  show(record) {
    if (!this.of || record.id !== this.id) return;
    const list = document.createElement("dl");
    for (const [name, field] of ROWS) {
      const text = field === "value" && typeof record.value === "number" ? `${record.value} ${record.unit}` : record[field];
      if (text === "" || text === null || (field === "value" && typeof record.value !== "number")) continue;
      const term = document.createElement("dt"), what = document.createElement("dd");
      term.textContent = name;
      what.textContent = text;
      list.append(term, what);
    }
    const close = document.createElement("button");
    close.className = "close";
    close.type = "button";
    close.setAttribute("aria-label", "Close");
    close.textContent = "×";
    close.addEventListener("click", () => this.close());
    this.card.replaceChildren(close, list);
    if (this.card.hidden) this.place();
  }

  place() {
    const at = /** @type {HTMLElement} */ (this.of).getBoundingClientRect();
    this.card.hidden = false;
    const wide = this.card.offsetWidth;
    this.card.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - wide - 12)) + scrollX}px`;
    this.card.style.top = `${at.bottom + scrollY + 8}px`;
  }
}
