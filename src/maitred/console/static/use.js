// What one's own key used, and what its limits leave.

import { el, panel, row, table } from "./dom.js";
import { count, usd } from "./format.js";
import { limitOf } from "./live.js";
import { get } from "./server.js";

const MODELS = [["Model"], ["Requests", true], ["Prompt tokens", true], ["Answer tokens", true], ["Cost", true]];

export function usePage(me) {
  const limits = panel("Limits", { note: me.tenant });
  const used = panel("Use by model");
  const node = el("div", { class: "grid single" }, limits.node, used.node);

  async function enter() {
    try {
      const own = await get("/console/use");
      used.hint.textContent = `key ${me.key}, last ${own.days} days`;
      const subjects = Object.entries(own.limits);
      limits.body.replaceChildren(...(subjects.length
        ? subjects.map(([subject, all]) => el("div", {}, el("h3", {}, subject.replace(":", " ")), el("ul", { class: "limits" }, all.map(limitOf))))
        : [el("p", { class: "empty" }, "Nothing is limited for this key or its tenants.")]));
      const list = table("Use by model", MODELS);
      list.rows.append(...own.models.map((one) => row(MODELS, [one.model, count(one.requests), count(one.prompt_tokens), count(one.output_tokens), usd(one.cost_usd)])));
      used.body.replaceChildren(own.models.length ? list.node : el("p", { class: "empty" }, "Nothing yet. Requests appear here within a second of their end."));
    } catch (error) {
      used.body.replaceChildren(el("p", { class: "fault", role: "alert" }, error.message));
    }
  }

  return { node, enter };
}
