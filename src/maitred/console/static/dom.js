// Elements from plain calls. Text goes in as text: nothing that a model or a tenant wrote is ever read as markup.

/** An element. `on…` are listeners, `class` and `aria-…` attributes; what is null or false is left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** A titled part of a page; `body` is filled later. */
export function panel(title, { note = "", wide = false } = {}) {
  const id = `panel-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  const body = el("div", { class: "body" });
  const hint = el("span", { class: "note" }, note);
  const node = el("section", { class: wide ? "panel wide" : "panel", "aria-labelledby": id },
    el("div", { class: "head" }, el("h2", { id }, title), hint), body);
  return { node, body, hint };
}

/** A table that scrolls by itself where the screen is narrow. `columns`: [title, numeric?]. */
export function table(label, columns) {
  const rows = el("tbody");
  const heads = columns.map(([title, numeric]) => el("th", { scope: "col", class: numeric && "number" }, title));
  const node = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    el("table", {}, el("thead", {}, el("tr", {}, heads)), rows));
  return { node, rows };
}

/** A row; cells are texts or elements. On a phone a row is a card, whose lines begin with their columns' titles. */
export function row(columns, cells) {
  return el("tr", {}, cells.map((cell, number) =>
    el("td", { class: columns[number][1] && "number", "data-title": columns[number][0] }, cell)));
}

/** A row over the whole width, for a table that has nothing to show. */
export const wholeRow = (columns, text) => el("tr", {}, el("td", { colspan: columns.length, class: "empty" }, text));

/** A short state with its colour: good, warn, bad or muted. */
export const badge = (tone, text) => el("span", { class: `badge ${tone}` }, text);

/** A named number. */
export const fact = (name, value) => el("div", {}, el("span", { class: "hint" }, name), el("b", {}, value));

/** The rows of a long list, some at a time, with a button that shows more. `rows` is where they go; `rowOf` makes one.
 *  `show(items, more)` begins anew; `more`, if given, gets the next items as [items, more]. */
export function longList(list, columns, rowOf, { empty, size = 100 }) {
  const told = el("span", { class: "hint", role: "status" });
  const button = el("button", { type: "button", class: "quiet", hidden: true }, "Show more");
  const fault = el("span", { class: "fault", role: "alert" });
  const node = el("div", { class: "pages" }, list.node, el("div", { class: "actions" }, fault, told, button));
  let items = [];
  let shown = 0;
  let fetchMore = null;

  function append() {
    const next = items.slice(shown, shown + size);
    list.rows.append(...next.map(rowOf));
    shown += next.length;
    button.hidden = shown === items.length && !fetchMore;
    told.textContent = button.hidden ? "" : `${shown} of ${items.length}${fetchMore ? " or more" : ""}`;
  }

  button.addEventListener("click", () => attempt(fault, async () => {
    if (shown === items.length && fetchMore) {
      const [more, after] = await fetchMore();
      items = [...items, ...more];
      fetchMore = after;
    }
    append();
  }));

  return {
    node,
    show(all, more = null) {
      const before = shown, focused = labelWithin(list.rows);
      items = all;
      fetchMore = more;
      shown = 0;
      list.rows.replaceChildren(...(all.length ? [] : [wholeRow(columns, empty)]));
      do append(); while (shown < Math.min(before, items.length));
      focusAgain(list.rows, focused);
    },
  };
}

/** Puts `nodes` in place of what is there, unless `key` says that they show the same. A field that somebody writes in
 *  stays as it is, and so does the focus of a button. */
export function refill(place, key, nodes) {
  if (place.dataset.key === key) return;
  const focused = place.contains(document.activeElement) ? document.activeElement : null;
  if (focused?.matches("input")) return;
  place.dataset.key = key;
  const label = labelWithin(place);
  place.replaceChildren(...nodes());
  focusAgain(place, label);
}

/** The label of the button within `place` that has the focus. */
const labelWithin = (place) => (place.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null);

/** Gives the focus to the button of that label, which was made anew. */
function focusAgain(place, label) {
  if (label) [...place.querySelectorAll("button")].find((button) => button.getAttribute("aria-label") === label)?.focus();
}

/** Does something; `fault` shows what went wrong. Returns what came of it, or null. */
export async function attempt(fault, work) {
  fault.textContent = "";
  try {
    return await work();
  } catch (error) {
    fault.textContent = error.message;
    fault.scrollIntoView({ block: "nearest" });
    return null;
  }
}

/** A bar for a share, with its words. */
export function meter(share, label, tone = "") {
  const bar = el("span", { class: `fill ${tone}` });
  bar.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  return el("span", { class: "meter", role: "img", "aria-label": label, title: label }, bar);
}

/** A form's field with its label. */
export function field(label, input, hint = "") {
  const id = `f-${Math.random().toString(36).slice(2, 9)}`;
  input.id = id;
  const note = hint ? el("span", { class: "hint", id: `${id}-h` }, hint) : null;
  if (note) input.setAttribute("aria-describedby", `${id}-h`);
  return el("div", { class: "field" }, el("label", { for: id }, label), input, note);
}

/** A dialog in the middle; resolves with what its buttons say, or "" when it is closed. */
export function ask(title, content, buttons) {
  return new Promise((resolve) => {
    const dialog = el("dialog", { "aria-labelledby": "dialog-title" },
      el("form", { method: "dialog" },
        el("h2", { id: "dialog-title" }, title), content,
        el("div", { class: "actions" },
          buttons.map(([label, value, tone]) => el("button", { value, class: tone || "quiet" }, label)))));
    dialog.addEventListener("close", () => { dialog.remove(); resolve(dialog.returnValue); });
    document.body.append(dialog);
    dialog.showModal();
  });
}
