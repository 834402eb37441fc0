// What the cache of answers keeps, and how it is removed, with its similar questions: through the administration's API
// like everybody else.

import { ask, attempt, el, field, panel, row, table } from "./dom.js";
import { count } from "./format.js";
import { similarPanel } from "./similar.js";
import { get, send } from "./server.js";

const KEPT = [["Tenant"], ["Model"], ["Epoch"], ["Answers", true], ["Bytes", true], [""]];

export function answersPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "hint", role: "status" });
  const kept = panel("Kept answers", { wide: true });
  const list = table("Kept answers", KEPT);
  const similar = similarPanel();
  const node = el("div", { class: "grid single" }, fault, kept.node, similar.node);

  /** Does something, shows what went wrong, and looks at what is kept now. */
  const doing = (work) => attempt(fault, async () => {
    await work();
    const { store, data } = await get("/admin/v1/cache");
    kept.hint.textContent = store.backend === "redis" ? "in the Redis that gateways share" : `${count(store.bytes)} of ${count(store.max_bytes)} bytes`;
    list.rows.replaceChildren(...(data.length ? data.map(keptRow)
      : [el("tr", {}, el("td", { colspan: KEPT.length, class: "empty" }, "Nothing is kept."))]));
  });

  function keptRow(group) {
    const { tenant, model, epoch } = group;
    const name = `the answers of ${tenant} by ${model}${epoch && ` in epoch ${epoch}`}`;
    return row(KEPT, [tenant, model, epoch || "–", count(group.answers), count(group.bytes),
      el("button", { type: "button", class: "quiet danger", "aria-label": `Remove ${name}`, onclick: () => remove({ tenant, model, epoch }, name) }, "Remove")]);
  }

  async function remove(selection, name) {
    const answer = await ask(`Remove ${name}?`, el("p", {}, "Who asks the same again has the answer computed. This cannot be undone."),
      [["Keep", ""], ["Remove", "yes", "danger strong"]]);
    if (answer !== "yes") return;
    await doing(async () => {
      const { removed } = await send("DELETE", `/admin/v1/cache?${new URLSearchParams(selection)}`);
      said.textContent = `${count(removed)} removed.`;
    });
  }

  function form() {
    const inputs = { tenant: el("input", { autocomplete: "off" }), model: el("input", { autocomplete: "off" }),
      epoch: el("input", { autocomplete: "off" }), key: el("input", { autocomplete: "off", pattern: "[0-9a-f]{32}" }) };
    const form = el("form", { class: "row-form", "aria-label": "Remove answers" },
      field("Tenant", inputs.tenant), field("Model", inputs.model), field("Epoch", inputs.epoch), field("Key", inputs.key, "x-maitred-cache-key of a response"),
      el("button", { class: "strong danger" }, "Remove"),
      el("button", { type: "button", class: "quiet danger", onclick: () => remove({ all: true }, "all answers") }, "Remove all"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]).filter(([, value]) => value);
      if (!given.length) fault.textContent = "Which answers? Fill in at least one field.";
      else remove(Object.fromEntries(given), `the answers with ${given.map(([name, value]) => `${name} ${value}`).join(", ")}`);
    });
    return form;
  }

  kept.body.append(form(), said, list.node);
  return {
    node,
    leave: similar.leave,
    enter() {
      return Promise.all([similar.enter(), doing(() => {})]);
    },
  };
}
