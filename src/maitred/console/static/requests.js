// The last requests, and what happened to one of them as a line of time: what `maitred explain` tells.

import { attempt, badge, el, fact, field, longList, panel, row, table } from "./dom.js";
import { count, date, milliseconds, percent, quoted, span, usd, words } from "./format.js";
import { get, pageOf, Refusal } from "./server.js";

const LAST = [["Request"], ["Ended"], ["Model"], ["Tenant"], ["Outcome"], ["First token", true], ["Took", true], ["Tokens", true]];
const MOST = 500;
const CANDIDATES = [["Replica"], ["First token", true], ["Wait", true], ["Prefill", true], ["Prompt held", true], ["Requests", true], ["Share", true]];
const TONES = { finished: "good", failed: "bad", refused: "warn", cancelled: "muted" };
// What each part is, in words for whoever reads it for the first time.
const MEANS = {
  resolve: ["Arrival", "read, identified, and its model found"], plan: ["Plan", "prompt counted, turn predicted"],
  admission: ["Limits", "what it may cost is reserved"], queue: ["Queue", "waited for a replica"], routing: ["Choice of replica", "the only one that could take it"],
  attempt: ["Replica", "worked on it"], engine: ["Engine", "as the engine has seen it"], "engine.queue": ["Engine's queue", "waited for a place in the batch"],
  prefill: ["Prefill", "prompt computed, up to the first token"], decode: ["Decode", "tokens after the first"], encode: ["Encode", "vectors computed"],
  settlement: ["Cost", "written into the ledger"],
};
const SPILLS = { objective: "its first token would have come too late here", session: "its session is there", no_replica: "no replica here was ready", residency: "it may not run here", continuation: "its replica was lost, and none here had room" };

/** The last requests, or what happened to the one that the address names. */
export const requestsPage = (me, _, id) => (id ? requestPage(id) : lastPage());

function searchForm(id = "") {
  const input = el("input", { required: true, autocomplete: "off", spellcheck: "false", maxlength: 128, value: id });
  const form = el("form", { class: "row-form", "aria-label": "One request" }, field("Request id", input, "x-request-id of its answer"), el("button", { class: "strong" }, "Explain"));
  form.addEventListener("submit", (event) => { event.preventDefault(); location.hash = `requests/${quoted(input.value.trim())}`; });
  return form;
}

function lastPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const { node: part, body, hint } = panel("Last requests", { wide: true });
  const list = longList(table("Last requests", LAST), LAST, lastRow, { empty: "This gateway has answered nothing yet.", size: 50 });
  const again = el("button", { type: "button", class: "quiet" }, "Look again");

  async function load() {
    const { data } = await get(`/admin/v1/requests?limit=${MOST}`);
    hint.textContent = data.length === MOST ? `the last ${MOST}` : "";
    list.show(data);
  }

  again.addEventListener("click", () => attempt(fault, load));
  body.append(fault, searchForm(), el("div", { class: "actions" }, again), list.node);
  return { node: el("div", { class: "grid single" }, part), enter: () => attempt(fault, load) };
}

const lastRow = (one) => row(LAST, [el("a", { href: `#requests/${quoted(one.id)}` }, el("code", {}, one.id)), date(one.time), one.model ?? "–", one.organisation ?? "–",
  badge(TONES[one.outcome] ?? "muted", one.status >= 400 ? `${one.outcome} ${one.status}` : one.outcome), milliseconds(one.ttft_ms), milliseconds(one.duration_ms), count(one.output_tokens)]);

function requestPage(id) {
  const fault = el("p", { class: "fault", role: "alert" });
  const whole = panel("Request", { wide: true });
  const line = panel("What happened", { wide: true });
  const node = el("div", { class: "grid single" }, el("p", {}, el("a", { href: "#requests" }, "Last requests")), fault, whole.node, line.node);
  line.node.hidden = true;

  async function load() {
    const [told, [events]] = await Promise.all([
      get(`/admin/v1/requests/${quoted(id)}`).catch((error) => { if (error instanceof Refusal && error.status === 404) return error; throw error; }),
      pageOf(`/admin/v1/usage/events?start=-365d&request_id=${quoted(id)}`, 1)]);
    const [ledger] = events;
    const known = !(told instanceof Refusal);
    if (!known && !ledger) throw told;
    whole.body.replaceChildren(searchForm(id), ...(known ? heading(told) : ledgerOnly(ledger, told.message)), ledger?.feedback && opinion(ledger.feedback) || "");
    line.node.hidden = !known;
    if (known) line.body.replaceChildren(timeline(told));
  }

  whole.body.append(searchForm(id));
  return { node, enter: () => attempt(fault, load) };
}

const opinion = (feedback) => el("p", {}, badge({ good: "good", bad: "bad" }[feedback.verdict] ?? "muted", feedback.verdict), ` ${feedback.text || "rated without words"}`);
const list = (values) => values?.length ? values.join(", ") : null;

/** What is known of the request as a whole; what says nothing is left out. */
function heading(told) {
  const end = [told.error, told.refused_by && words(told.refused_by).toLowerCase()].filter(Boolean).join(", ");
  const waits = Object.entries(told.waited_ms).filter(([, ms]) => ms > 0).map(([cause, ms]) => `${words(cause).toLowerCase()} ${milliseconds(ms)}`);
  const facts = [
    ["model", told.asked && told.asked !== told.model ? `${told.model ?? "none"}, asked for as ${told.asked}` : told.model], ["tenant", list([...new Set([told.organisation, told.tenant].filter(Boolean))])],
    ["key", told.key], ["class", told.priority], ["took", milliseconds(told.duration_ms)], ["first token", told.ttft_ms === null ? null : milliseconds(told.ttft_ms)],
    ["waited", list(waits)], ["prompt", `${count(told.prompt_tokens)} tokens${told.cached_tokens ? `, ${count(told.cached_tokens)} cached` : ""}`], ["answer", `${count(told.output_tokens)} tokens`],
    ["ended by", list(told.finish_reasons)], ["cost", told.cost_usd === null ? null : usd(told.cost_usd)], ["cache of answers", told.cache], ["rollout", told.rollout],
    ["degraded", list(told.degraded)], ["fallbacks", list(told.fallbacks)], ["escalated", list(told.escalated)], ["continued after a loss", told.recoveries ? `${count(told.recoveries)} times` : null],
    ["parameters", list(Object.entries(told.parameters).map(([name, value]) => `${name} ${value}`))], ["trace", told.trace_id],
  ];
  return [el("h3", { class: "outcome" }, badge(TONES[told.outcome] ?? "muted", `${told.outcome} ${told.status}`), el("span", { class: "note" }, `${told.route}, ended ${date(told.time)}`)),
    end && el("p", { class: "fault" }, end) || "",
    el("div", { class: "facts" }, facts.filter(([, value]) => value !== null && value !== "" && value !== undefined).map(([name, value]) => fact(name, value)))];
}

function ledgerOnly(event, why) {
  const facts = [["model", event.model], ["tenant", event.tenant], ["replica", event.replica || "–"], ["took", span(event.duration_s)], ["first token", span(event.ttft_s)],
    ["prompt", `${count(event.prompt_tokens)} tokens`], ["answer", `${count(event.output_tokens)} tokens`], ["cost", usd(event.cost_usd)]];
  return [el("h3", { class: "outcome" }, badge(TONES[event.outcome] ?? "muted", event.outcome), el("span", { class: "note" }, `${event.route}, ended ${date(event.time)}`)),
    el("p", { class: "hint" }, `The ledger has its line; what happened to it is not known any more. ${why}`), el("div", { class: "facts" }, facts.map(([name, value]) => fact(name, value)))];
}

/** Every span as a line, its bar where it was in the time of the whole. */
function timeline(told) {
  const whole = Math.max(told.duration_ms, 0.001);
  return el("ol", { class: "timeline" }, told.chapters.map((chapter) => spanItem(chapter, whole)));
}

function spanItem(one, whole) {
  const { candidates, ...facts } = one.facts;
  const [title, usual] = MEANS[one.name] ?? [words(one.name), ""];
  const meaning = candidates?.length ? "the one with the soonest first token, as predicted" : usual;
  const took = one.took_ms === null ? "had not ended" : one.took_ms === 0 ? "at once" : milliseconds(one.took_ms);
  const bar = el("i", { class: `span ${one.error ? "bad" : one.name.includes("queue") ? "warn" : ""}` });
  const from = Math.min(100, (one.at_ms / whole) * 100);
  bar.style.left = `${from.toFixed(2)}%`;
  bar.style.width = `${Math.max(0.4, Math.min(100 - from, ((one.took_ms ?? whole - one.at_ms) / whole) * 100)).toFixed(2)}%`;
  return el("li", {},
    el("div", { class: "line" }, el("span", { class: "what" }, el("b", {}, title), el("span", { class: "hint" }, ` ${meaning}`)),
      el("span", { class: "track", role: "img", "aria-label": `from ${milliseconds(one.at_ms)}, ${took}` }, bar),
      el("span", { class: "hint when" }, `at ${milliseconds(one.at_ms)}, ${took}`)),
    one.error && el("p", { class: "fault" }, `failed: ${one.error}`),
    factList(facts), candidates?.length > 0 && candidateTable(candidates, facts),
    one.inside?.length > 0 && el("ol", {}, one.inside.map((inner) => spanItem(inner, whole))));
}

const says = (value) => !(value === null || value === "" || value === false || value === 0 || (typeof value === "object" && !Object.keys(value).length));

function factList(facts) {
  const told = Object.entries(facts).filter(([, value]) => says(value));
  return told.length > 0 && el("p", { class: "told" }, told.map(([name, value]) => el("span", {}, `${factName(name)} `, el("b", {}, factText(name, value)))));
}

const NAMES = { spill: "ran elsewhere because", predicted_ttft_s: "predicted first token" };
const factName = (name) => NAMES[name] ?? words(name.replace(/_(s|ms|usd)$/, "")).toLowerCase();

function factText(name, value) {
  if (name === "spill") return SPILLS[value] ?? value;
  if (Array.isArray(value)) return value.map((each) => factText(name, each)).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, inner]) => `${words(key).toLowerCase()} ${factText(name, inner)}`).join(", ");
  if (typeof value !== "number") return value === true ? "yes" : String(value);
  if (name.endsWith("_ms")) return milliseconds(value);
  if (name.endsWith("_s")) return span(value);
  return name.endsWith("_usd") ? usd(value) : count(value);
}

/** Why this replica: what was predicted for each one that could have been taken. */
function candidateTable(candidates, { replica }) {
  const chosen = table("Replicas that could have been taken", CANDIDATES);
  chosen.rows.append(...candidates.map((one) => row(CANDIDATES, [
    [one.replica, one.replica === replica && el("span", { class: "hint" }, " taken")], span(one.predicted_ttft_s), span(one.wait_s ?? 0), span(one.prefill_s ?? 0),
    `${count(one.held_tokens ?? 0)} tokens`, count(one.requests ?? 0), percent(one.weight ?? 1)])));
  return chosen.node;
}
