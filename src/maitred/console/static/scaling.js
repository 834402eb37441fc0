// How many replicas models have, why, and whether it turns out as predicted: a panel of the live page, and a page with
// the replicas that come and go and the regions. For administrators.

import { ask, attempt, badge, el, fact, field, meter, panel, refill, row, table, wholeRow } from "./dom.js";
import { count, date, percent, quoted, span, words } from "./format.js";
import { get, poll, send } from "./server.js";

const EVERY_MS = 2_000;
const MOST = 50;
const MODELS = [["Model"], ["Desired", true], ["Actual"], ["Why"], ["Forecast"], ["First token"], [""]];
const OUTCOMES = [["Minute"], ["Predicted", true], ["Measured", true], ["Objective", true], ["Requests", true], ["Measured of objective"]];
const POOLED = [["Replica"], ["Phase"], ["For", true], ["Serves in", true], ["Region"], ["Last start"], ["Why not"]];
const REGIONS = [["Region"], ["Models"], ["Replicas", true], ["Ready", true], ["Requests", true], ["Round trip", true]];
const PHASES = { serving: "good", failed: "bad", draining: "warn", maintenance: "warn" };
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
    await send("DELETE", `/admin/v1/scaling/override?model=${quoted(model)}`);
    await load();
  }

  return { node, load, ...poll(load, EVERY_MS) };
}

async function showDecisions(model) {
  const { data } = await get(`/admin/v1/scaling/decisions?limit=${MOST}&model=${quoted(model)}`);
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

/** The page: what the panel shows, the last decisions and outcomes, the replicas by phase, and the regions. */
export function scalingPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const away = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const summary = scalingPanel();
  const place = el("div", { class: "grid single" });
  const pools = panel("Replicas that come and go", { wide: true, note: "started by this gateway, an agent or Ray" });
  const regions = panel("Regions", { wide: true });
  const regionList = table("Regions", REGIONS);
  regions.body.append(regionList.node);
  const node = el("div", { class: "grid single" }, away, fault, said, summary.node, place, pools.node, regions.node);

  async function load() {
    const [scaled, pooled, replicas, onDemand] = await Promise.all([get("/admin/v1/scaling"), get("/admin/v1/replicas/pools"), get("/admin/v1/replicas"), get("/admin/v1/models")]);
    const regionOf = Object.fromEntries(replicas.data.map(({ replica, region }) => [replica, region]));
    // The demand decides on these.
    const names = [...scaled.data, ...onDemand.data].map(({ model }) => model);
    refill(place, JSON.stringify(scaled.data.map((scaling) => [shownOf(scaling), scaling.starts, scaling.objectives])), () => (scaled.data.length ? scaled.data.map(modelPanel)
      : [el("p", { class: "panel empty" }, "The number of replicas of no model follows the demand: model.autoscaling.enabled does it.")]));
    refill(pools.body, JSON.stringify([pooled.data.map(settled), regionOf, names]), () => (pooled.data.length ? pooled.data.map((pool) => poolOf(pool, regionOf, names))
      : [el("p", { class: "empty" }, "This gateway starts no replicas: all run elsewhere.")]));
    const all = regionsOf(replicas.data);
    regions.node.hidden = !all.some(([name]) => name);
    refill(regionList.rows, JSON.stringify(all), () => all.map(([, cells]) => row(REGIONS, cells)));
  }

  function modelPanel(scaling) {
    const { model, objectives, outcomes, starts } = scaling;
    const { node: part, body } = panel(`Scaling of ${model}`, { wide: true });
    const list = table(`Predicted and measured first tokens of ${model}`, OUTCOMES);
    const last = outcomes.filter(({ requests }) => requests).slice(-10).reverse();
    list.rows.append(...(last.length ? last.map((one) => outcomeRow(one, objectives)) : [wholeRow(OUTCOMES, "No request in the last hour.")]));
    body.append(el("div", { class: "facts" },
      fact("desired", count(scaling.desired)), fact("actual", actualOf(scaling)), fact("limits", `${count(objectives.min_replicas)} to ${count(objectives.max_replicas)}`),
      fact("objectives", `first token ${span(objectives.ttft_s)}, then ${span(objectives.itl_s)}`), fact("one replica serves", scaling.decision?.replica_requests_per_s ? `${count(scaling.decision.replica_requests_per_s)}/s` : "–"),
      fact("decides", scaling.deciding ? "this gateway" : scaling.owner || "nobody yet"),
      ...starts.map((start) => fact(`start, ${words(start.kind).toLowerCase()}`, `${span(start.p50_s)}, nine of ten within ${span(start.p90_s)}`))),
    overrideForm(scaling), el("h3", { class: "sub" }, "Prediction and outcome"), list.node);
    return part;
  }

  const does = (work, done) => attempt(fault, async () => {
    await work();
    said.textContent = done;
    await Promise.all([load(), summary.load()]);
  });

  function overrideForm({ model, objectives }) {
    const number = el("input", { type: "number", min: objectives.min_replicas, max: objectives.max_replicas, step: 1, required: true });
    const hours = el("input", { type: "number", min: 0.1, max: 720, step: "any", value: 1, required: true });
    const form = el("form", { class: "row-form", "aria-label": `Override of ${model}` }, field("Replicas for a time", number), field("Hours", hours), el("button", { class: "quiet" }, "Set number"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      does(() => send("POST", "/admin/v1/scaling/override", { model, replicas: Number(number.value), for_s: Number(hours.value) * 3600 }), "The number is set.");
    });
    return form;
  }

  function poolOf(pool, regionOf, decided) {
    const list = table(`Replicas of ${pool.model}`, POOLED);
    list.rows.append(...(pool.replicas.length ? pool.replicas.map((one) => pooledRow(one, regionOf)) : [wholeRow(POOLED, "None now: the next request waits for a start.")]));
    return el("article", { class: "engine" }, el("h3", {}, pool.model, el("span", { class: "note" }, `${count(pool.serving)} to serve${pool.asleep ? `, ${count(pool.asleep)} asleep` : ""}`)),
      !decided.includes(pool.model) && scaleForm(pool), list.node);
  }

  function scaleForm({ model, serving }) {
    const number = el("input", { type: "number", min: 0, max: 64, step: 1, required: true, value: serving, "aria-label": `Replicas of ${model} that serve` });
    const form = el("form", { class: "inline" }, number, el("button", { class: "quiet", "aria-label": `Set replicas of ${model}` }, "Set replicas"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const text = `${number.value} replicas of ${model} are to serve, until the gateway is started again.`;
      if (await ask("Set replicas?", el("p", {}, text), [["Cancel", ""], ["Set", "yes", "strong"]]) !== "yes") return;
      number.blur();
      await does(() => send("POST", "/admin/v1/replicas/scale", { model, serving: Number(number.value) }), text);
    });
    return form;
  }

  const polled = poll(load, EVERY_MS, away);
  return { node, enter: () => Promise.all([summary.enter(), polled.enter()]), leave: () => { summary.leave(); polled.leave(); } };
}

/** A pool without what changes with every second. */
const settled = ({ ready_in_s: _, replicas, ...pool }) => [pool, replicas.map(({ since_s: __, ready_in_s: ___, ...one }) => one)];

function pooledRow(one, regionOf) {
  const parts = Object.entries(one.start_s).map(([name, seconds]) => `${words(name).toLowerCase()} ${span(seconds)}`).join(", ");
  return row(POOLED, [one.replica, badge(PHASES[one.phase] ?? "muted", one.phase), span(one.since_s), span(one.ready_in_s), regionOf[one.replica] ?? "–",
    [one.start_kind ? words(one.start_kind) : "–", parts && el("span", { class: "hint" }, ` ${parts}`)], one.failure ?? "–"]);
}

function outcomeRow(outcome, { ttft_s: objective }) {
  const told = `${span(outcome.measured_s)} of ${span(objective)}`;
  const share = outcome.measured_s === null ? 0 : outcome.measured_s / objective;
  return row(OUTCOMES, [date(outcome.at), span(outcome.predicted_s), span(outcome.measured_s), span(objective), count(outcome.requests), meter(share, told, share > 1 ? "bad" : share > 0.8 ? "warn" : "good")]);
}

/** Regions with what runs there, as [name or empty, cells]. */
function regionsOf(replicas) {
  const names = [...new Set(replicas.map(({ region }) => region ?? ""))].sort();
  return names.map((name) => {
    const there = replicas.filter(({ region }) => (region ?? "") === name);
    const trips = there.map((one) => one.round_trip_ms).filter((ms) => ms !== null);
    return [name, [name || "no name", [...new Set(there.map(({ model }) => model))].join(", "), count(there.length), count(there.filter(({ ready }) => ready).length),
      count(there.reduce((sum, one) => sum + one.requests, 0)), trips.length ? span(Math.min(...trips) / 1000) : "–"]];
  });
}
