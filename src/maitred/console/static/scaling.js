// How many replicas models have, why, and whether it turns out as predicted. For administrators.

import { ask, attempt, el, panel, refill, row, table } from "./dom.js";
import { count, date, percent, span, words } from "./format.js";
import { get, poll, send } from "./server.js";

const EVERY_MS = 2_000;
const MOST = 50;
const MODELS = [["Model"], ["Desired", true], ["Actual"], ["Why"], ["Forecast"], ["First token"], [""]];
const BAD = ["limited", "unreachable"];

/** The panel; hidden where the number of replicas of no model follows the demand. */
export function scalingPanel() {
  const { node, body } = panel("Scaling", { wide: true });
  const list = table("Scaling", MODELS);
  const fault = el("p", { class: "fault", role: "alert" });
  body.append(fault, list.node);
  node.hidden = true;

  async function load() {
    const { data } = await get("/admin/v1/scaling");
    node.hidden = !data.length;
    refill(list.rows, JSON.stringify(data.map(shownOf)), () => data.map(modelRow));
  }

  function modelRow(scaling) {
    const { model, decision, override } = scaling;
    const tone = !decision ? "muted" : BAD.includes(decision.reason) ? "warn" : "good";
    return row(MODELS, [model,
      [count(scaling.desired), scaling.asleep > 0 && el("span", { class: "hint" }, ` and ${count(scaling.asleep)} asleep`)],
      actualOf(scaling),
      [decision && el("span", { class: `badge ${tone}` }, words(decision.reason)), el("span", { class: "hint" }, ` ${whyOf(scaling)}`)],
      forecastOf(decision), firstTokenOf(scaling),
      [el("button", { type: "button", class: "quiet", "aria-label": `Decisions on ${model}`, onclick: () => attempt(fault, () => showDecisions(model)) }, "Decisions"),
        override && el("button", { type: "button", class: "quiet danger", "aria-label": `End override of ${model}`, onclick: () => attempt(fault, () => endOverride(model)) }, "End override")]]);
  }

  async function endOverride(model) {
    await send("DELETE", `/admin/v1/scaling/override?model=${encodeURIComponent(model)}`);
    await load();
  }

  return { node, ...poll(load, EVERY_MS) };
}

async function showDecisions(model) {
  const { data } = await get(`/admin/v1/scaling/decisions?limit=${MOST}&model=${encodeURIComponent(model)}`);
  const list = data.length
    ? el("ul", { class: "compared" }, data.map((decision) => el("li", {},
      el("span", { class: "badge muted" }, `${count(decision.desired)} replicas`), el("span", { class: "hint" }, ` ${date(decision.at)}, ${words(decision.reason)}`),
      el("p", {}, decision.text))))
    : el("p", { class: "empty" }, "Nothing was decided yet.");
  await ask(`Decisions on ${model}`, list, [["Close", ""]]);
}

/** What a row shows: the same state is not drawn again. */
const shownOf = (scaling) => [scaling.model, scaling.desired, actualOf(scaling), whyOf(scaling), scaling.decision?.reason, scaling.decision?.forecast, scaling.override, scaling.outcomes.at(-1)];

const actualOf = ({ actual }) => Object.entries(actual).map(([phase, number]) => `${count(number)} ${phase}`).join(", ") || "none";

function whyOf({ decision, override, deciding, owner }) {
  const until = override ? ` Until ${date(override.until)}.` : "";
  return (decision ? decision.text : deciding || !owner ? "Nothing was decided yet." : `${owner} decides.`) + until;
}

function forecastOf(decision) {
  if (!decision) return "–";
  const { low, mean, high, coverage } = decision.forecast;
  const known = coverage === null ? "" : `, right in ${percent(coverage)}`;
  return [`${count(mean)}/s`, el("span", { class: "hint" }, ` ${count(low)} to ${count(high)} in ${span(decision.lead_time_s)}${known}`)];
}

function firstTokenOf({ outcomes, objectives, decision }) {
  const last = outcomes.findLast((outcome) => outcome.measured_s !== null);
  const predicted = last ? last.predicted_s : decision?.predicted_ttft_s ?? null;
  return [span(last?.measured_s), el("span", { class: "hint" }, ` predicted ${span(predicted)}, objective ${span(objectives.ttft_s)}`)];
}
