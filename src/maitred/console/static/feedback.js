// What users thought of answers: how models and sides of rollouts are rated, and each opinion with its request.

import { attempt, badge, el, field, longList, meter, panel, row, table, wholeRow } from "./dom.js";
import { count, date, percent, quoted } from "./format.js";
import { pageOf } from "./server.js";

const RATED = [["Model"], ["Rollout"], ["Requests", true], ["Rated", true], ["Mean score"]];
const OPINIONS = [["When"], ["Score"], ["Model"], ["Tenant"], ["What was said"], ["Tags"], ["Request"]];
const TONES = { good: "good", neutral: "muted", bad: "bad" };
const WHICH = [["any", "All"], ["bad", "Bad"], ["neutral", "Neutral"], ["good", "Good"]];
const TIMES = [["-1d", "Last 24 hours"], ["-7d", "Last 7 days"], ["-30d", "Last 30 days"], ["-90d", "Last 90 days"]];

export function feedbackPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const models = panel("Models", { wide: true });
  const ratings = table("Models", RATED);
  const opinions = panel("Opinions", { wide: true });
  const list = longList(table("Opinions", OPINIONS), OPINIONS, opinionRow, { empty: "Nobody has said anything of this kind in this time." });
  const which = el("select", {}, WHICH.map(([value, title]) => el("option", { value }, title)));
  const start = el("select", {}, TIMES.map(([value, title]) => el("option", { value, selected: value === "-30d" }, title)));
  const model = el("input", { autocomplete: "off", placeholder: "all" });
  const form = el("form", { class: "row-form", "aria-label": "Which feedback" }, field("Verdict", which), field("When", start), field("Model", model), el("button", { class: "strong" }, "Show"));

  async function load() {
    const named = model.value.trim() && `&model=${quoted(model.value.trim())}`;
    const [sums, events] = await Promise.all([
      pageOf(`/admin/v1/usage?group_by=model,rollout&start=${start.value}${named}`, 500),
      pageOf(`/admin/v1/usage/events?feedback=${which.value}&start=${start.value}${named}`)]);
    const rated = sums[0].filter((sum) => sum.rated);
    ratings.rows.replaceChildren(...(rated.length ? rated.map(ratedRow) : [wholeRow(RATED, "No answer was rated in this time. Programs do it by POST /v1/feedback, people by the thumbs of the playground.")]));
    list.show(...events);
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); attempt(fault, load); });
  models.body.append(ratings.node);
  opinions.body.append(form, list.node);
  return { node: el("div", { class: "grid single" }, fault, models.node, opinions.node), enter: () => attempt(fault, load) };
}

function ratedRow(sum) {
  const told = `${percent(sum.mean_score)} good`;
  const tone = sum.mean_score > 0.5 ? "good" : sum.mean_score < 0.5 ? "bad" : "warn";
  return row(RATED, [sum.model, sum.rollout || "–", count(sum.requests), count(sum.rated),
    el("span", { class: "bound" }, el("span", { class: "hint" }, told), meter(sum.mean_score, told, tone))]);
}

function opinionRow(event) {
  const { score, verdict, text, tags } = event.feedback;
  return row(OPINIONS, [date(event.time), badge(TONES[verdict], score === 0 || score === 1 ? verdict : `${verdict} ${percent(score)}`),
    [event.model, event.rollout && el("span", { class: "hint" }, ` ${event.rollout}`)], event.tenant, text || el("span", { class: "hint" }, "no words"),
    tags.join(", ") || "–", el("a", { href: `#requests/${quoted(event.request_id)}` }, el("code", {}, event.request_id))]);
}
