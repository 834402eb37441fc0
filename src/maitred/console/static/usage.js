// What all tenants used, in sums that one chooses, to sort and to take away as CSV.

import { attempt, el, field, longList, meter, panel, row, table } from "./dom.js";
import { count, quoted, usd } from "./format.js";
import { pageOf, request } from "./server.js";

const GROUPS = [["organisation", "Organisation"], ["tenant", "Tenant"], ["key", "Key"], ["model", "Model"], ["rollout", "Rollout"], ["day", "Day"], ["month", "Month"]];
const CHOSEN = ["organisation", "model"];
const TIMES = [["-1d", "Last 24 hours"], ["-7d", "Last 7 days"], ["-30d", "Last 30 days"], ["-90d", "Last 90 days"], ["-365d", "Last year"]];
const SUMS = [["requests", "Requests"], ["prompt_tokens", "Prompt tokens"], ["cached_tokens", "Of these cached"], ["output_tokens", "Answer tokens"], ["cost_usd", "Cost"]];
const MOST_PAGES = 8;
const PAGE = 500;

export function usagePage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "hint", role: "status" });
  const { node: part, body } = panel("Usage", { wide: true });
  const place = el("div", {});
  const start = el("select", {}, TIMES.map(([value, title]) => el("option", { value, selected: value === "-30d" }, title)));
  const organisation = el("input", { autocomplete: "off", placeholder: "all" });
  const model = el("input", { autocomplete: "off", placeholder: "all" });
  const boxes = GROUPS.map(([name, title]) => [name, title, el("input", { type: "checkbox", id: `group-${name}`, checked: CHOSEN.includes(name) })]);
  const order = el("select", {});
  const csv = el("button", { type: "button", class: "quiet" }, "Download CSV");
  const form = el("form", { class: "row-form", "aria-label": "Which usage" },
    field("When", start), field("Organisation", organisation), field("Model", model),
    el("fieldset", { class: "broad" }, el("legend", {}, "Sums by"), boxes.map(([, title, box]) => el("span", { class: "check" }, box, el("label", { for: box.id }, title)))),
    field("Sorted by", order), el("div", { class: "actions start" }, el("button", { class: "strong" }, "Show"), csv));
  let rows = [];
  let groups = [];
  let sorted = "cost_usd";
  let down = true;

  const query = () => {
    const filters = [["organisation", organisation], ["model", model]].filter(([, input]) => input.value.trim());
    return `/admin/v1/usage?start=${start.value}&group_by=${groups.join(",")}${filters.map(([name, input]) => `&${name}=${quoted(input.value.trim())}`).join("")}`;
  };

  async function load() {
    groups = boxes.filter(([, , box]) => box.checked).map(([name]) => name);
    said.textContent = "Counting…";
    let [some, more] = await pageOf(query(), PAGE);
    rows = some;
    for (let page = 1; more && page < MOST_PAGES; page += 1) {
      [some, more] = await more();
      rows.push(...some);
    }
    const total = (name) => rows.reduce((sum, each) => sum + each[name], 0);
    said.textContent = `${usd(total("cost_usd"))}, ${count(total("requests"))} requests, ${count(total("prompt_tokens") + total("output_tokens"))} tokens in ${count(rows.length)} rows.`
      + (more ? ` These are only the first ${count(rows.length)} rows: the CSV has all.` : "");
    if (!groups.includes(sorted) && !SUMS.some(([name]) => name === sorted)) sort("cost_usd");
    order.replaceChildren(...titles().map(([name, title]) => el("option", { value: name, selected: name === sorted }, title)));
    draw();
  }

  const titles = () => [...GROUPS.filter(([name]) => groups.includes(name)), ...SUMS];

  /** Sorts by another column; by the same again the other way round. Numbers begin with the most. */
  function sort(name) {
    const numeric = SUMS.some(([each]) => each === name);
    down = name === sorted ? !down : numeric || name === "day" || name === "month";
    sorted = name;
    order.value = name;
  }

  function draw() {
    const way = down ? -1 : 1;
    rows.sort((a, b) => way * (typeof a[sorted] === "number" ? a[sorted] - b[sorted] : String(a[sorted]).localeCompare(String(b[sorted]))));
    const most = Math.max(0, ...rows.map((each) => each.cost_usd));
    const columns = [...titles().map(([name, title]) => [title, SUMS.some(([each]) => each === name)]), ["Share of the most"]];
    const list = table("Usage", columns);
    [...list.node.querySelectorAll("th")].slice(0, -1).forEach((head, place) => {
      const [name, title] = titles()[place];
      head.setAttribute("aria-sort", name !== sorted ? "none" : down ? "descending" : "ascending");
      head.replaceChildren(el("button", { type: "button", class: "sort", onclick: () => { sort(name); draw(); refocus(name); } }, title));
    });
    const shown = longList(list, columns, (sum) => row(columns, [...groups.map((name) => sum[name] || "–"),
      count(sum.requests), count(sum.prompt_tokens), count(sum.cached_tokens), count(sum.output_tokens), usd(sum.cost_usd),
      meter(most ? sum.cost_usd / most : 0, `${usd(sum.cost_usd)} of ${usd(most)}`)]), { empty: "Nothing was used in this time." });
    shown.show(rows);
    place.replaceChildren(shown.node);
  }

  /** Gives the focus back to the head of a column, which was drawn anew. */
  function refocus(name) {
    place.querySelectorAll("th button")[titles().findIndex(([each]) => each === name)]?.focus();
  }

  async function download() {
    groups = boxes.filter(([, , box]) => box.checked).map(([name]) => name);
    const response = await request("GET", `${query()}&format=csv`);
    const address = URL.createObjectURL(await response.blob());
    el("a", { href: address, download: `usage${groups.map((name) => `-${name}`).join("")}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60_000);
    said.textContent = "The CSV is downloaded.";
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); attempt(fault, load); });
  csv.addEventListener("click", () => attempt(fault, download));
  order.addEventListener("change", () => { const name = order.value; if (name !== sorted) sort(name); draw(); });
  body.append(fault, form, said, place);
  return { node: el("div", { class: "grid single" }, part), enter: () => attempt(fault, load) };
}
