// Scopes of the semantic cache: how each stands, which questions were compared, and a new beginning. For administrators.

import { ask, attempt, el, meter, panel, refill, row, table } from "./dom.js";
import { count, date, words } from "./format.js";
import { get, poll, send } from "./server.js";

const EVERY_MS = 10_000;
const MOST = 50;
const SCOPES = [["Model"], ["Who"], ["State"], ["Bound of false hits"], ["Same answers", true], ["Different", true], ["Look-ups", true], ["Served", true], ["Saved tokens", true], [""]];
const TONES = { certified: "good", shadow: "muted", tripped: "bad" };
const UNITS = { learning: "labels", training: "labels", scoring: "scores", certifying: "audits" };

/** The panel; hidden where there are no scopes. */
export function similarPanel() {
  const { node, body, hint } = panel("Similar questions", { wide: true });
  const list = table("Similar questions", SCOPES);
  const fault = el("p", { class: "fault", role: "alert" });
  body.append(fault, list.node);
  node.hidden = true;

  async function load() {
    const page = await get(`/admin/v1/cache/semantic?limit=${MOST}`);
    node.hidden = !page.data.length;
    hint.textContent = page.has_more ? `the first ${MOST}` : "";
    refill(list.rows, JSON.stringify(page.data), () => page.data.map(scopeRow));
  }

  function scopeRow(scope) {
    const who = whoOf(scope);
    return row(SCOPES, [scope.model, who,
      [el("span", { class: `badge ${TONES[scope.state]}` }, scope.state), el("span", { class: "hint" }, ` ${progressOf(scope)}`)], boundOf(scope),
      count(scope.same), count(scope.different), count(scope.lookups), count(scope.served), count(scope.saved_tokens),
      [el("button", { type: "button", class: "quiet", "aria-label": `Labels of ${scope.model}, ${who}`, onclick: () => attempt(fault, () => showLabels(scope)) }, "Labels"),
        el("button", { type: "button", class: "quiet danger", "aria-label": `Reset ${scope.model}, ${who}`, onclick: () => attempt(fault, () => reset(scope)) }, "Reset")]]);
  }

  async function reset(scope) {
    const answer = await ask(`Reset ${scope.model}, ${whoOf(scope)}?`,
      el("p", {}, "It serves nothing until it is certified again. With its labels, the next verifier is trained at once."),
      [["Leave it", ""], ["Keep labels", "keep", "danger"], ["Delete labels", "delete", "danger strong"]]);
    if (!answer) return;
    await send("POST", "/admin/v1/cache/semantic/reset", { scope: scope.scope, keep_labels: answer === "keep" });
    await load();
  }

  return { node, ...poll(load, EVERY_MS) };
}

async function showLabels(scope) {
  const { data } = await get(`/admin/v1/cache/semantic/labels?limit=${MOST}&scope=${encodeURIComponent(scope.scope)}`);
  const list = data.length
    ? el("ul", { class: "compared" }, data.map((label) => el("li", {},
      el("span", { class: `badge ${label.same ? "good" : "warn"}` }, label.same ? "same" : "different"), el("span", { class: "hint" }, ` ${date(label.created_at)}`),
      el("p", {}, label.asked), el("p", { class: "hint" }, label.cached))))
    : el("p", { class: "empty" }, "None are kept.");
  await ask("Compared questions", list, [["Close", ""]]);
}

function whoOf(scope) {
  if (scope.shared_by === "public") return "everybody";
  if (scope.shared_by === "key") return `key ${scope.key} of ${scope.tenant}`;
  return `${scope.shared_by} ${scope.tenant ?? scope.organisation}`;
}

function progressOf(scope) {
  const unit = UNITS[scope.phase];
  if (!unit) return scope.false_hits ? `${count(scope.false_hits)} false hits found` : "";
  if (scope.progress_needed === null) return `${scope.phase}: cannot pass any more`;
  return `${scope.phase}: ${count(scope.progress)} of ${count(scope.progress_needed)} ${unit}`;
}

function boundOf(scope) {
  if (scope.false_hit_bound === null) return "–";
  const told = `${hundredths(scope.false_hit_bound)} of ${hundredths(scope.budget)}`;
  const tone = scope.state === "certified" ? "good" : scope.state === "tripped" ? "bad" : "warn";
  return el("span", { class: "bound" }, el("span", { class: "hint" }, told), meter(scope.false_hit_bound / scope.budget, `${words(scope.state)}: ${told}`, tone));
}

const hundredths = (share) => `${(100 * share).toFixed(2)} %`;
