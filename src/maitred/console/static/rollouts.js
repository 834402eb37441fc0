// New versions of models on trial: their shares, what was seen of them, and what one decides.

import { ask, attempt, badge, el, fact, field, meter, panel, refill } from "./dom.js";
import { count, date, percent, usd, words } from "./format.js";
import { get, pageOf, poll, send } from "./server.js";

const EVERY_MS = 3_000;
const TONES = { running: "warn", switched: "good", promoted: "good", aborted: "bad", rolled_back: "bad" };
const STEPS = [["running", "On trial"], ["switched", "Switched"], ["promoted", "Promoted"]];
const BACK = { aborted: "Aborted", rolled_back: "Rolled back" };
const FAULTS = { ttft: "First token", itl: "Between tokens" };
const ORDERS = {
  promote: ["Promote", "Everybody gets the canary, for good.", "strong"],
  switch: ["Switch", "Everybody gets the canary at once. The stable version stays ready for a rollback.", "strong"],
  rollback: ["Roll back", "Everybody gets the stable version at once. What runs at the canary ends there.", "danger strong"],
  end: ["End", "The rollout is taken away: the name leads where it leads without it.", "danger strong"],
};

export function rolloutsPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const away = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const place = el("div", { class: "grid single" });
  const begin = panel("New rollout", { wide: true });
  const node = el("div", { class: "grid single" }, away, fault, said, place, begin.node);

  async function load() {
    const [{ data }, [sums]] = await Promise.all([get("/admin/v1/rollouts"), pageOf("/admin/v1/usage?group_by=rollout&start=-30d", 500)]);
    refill(place, JSON.stringify([data, sums]), () => (data.length ? data.map((one) => rolloutPanel(one, sums)) : [el("p", { class: "panel empty" }, "No model has a new version on trial.")]));
  }

  const does = (work, done) => attempt(fault, async () => {
    await work();
    said.textContent = done;
    await load();
  });

  async function order(verb, name) {
    const [title, text, tone] = ORDERS[verb];
    if (await ask(`${title} ${name}?`, el("p", {}, text), [["Cancel", ""], [title, "yes", tone]]) !== "yes") return;
    await does(() => send("POST", `/admin/v1/rollouts/${verb}`, { name }), `${title} ${name}: done.`);
  }

  function rolloutPanel(one, sums) {
    const { node: part, body, hint } = panel(`${one.name}`, { wide: true });
    hint.textContent = `${one.stable} to ${one.canary}${one.regions.length ? ` in ${one.regions.join(", ")}` : ""}`;
    const going = one.phase === "running" || one.phase === "switched";
    const verbs = going ? [...(one.phase === "running" ? ["switch"] : []), "promote", "rollback", "end"] : one.phase === "promoted" ? ["rollback", "end"] : ["end"];
    body.append(steps(one), shares(one, sums), ...evidence(one),
      el("div", { class: "actions" }, going && weightForm(one),
        verbs.map((verb) => el("button", { type: "button", class: ORDERS[verb][2].includes("danger") ? "quiet danger" : "quiet", "aria-label": `${ORDERS[verb][0]} ${one.name}`, onclick: () => order(verb, one.name) }, ORDERS[verb][0]))));
    return part;
  }

  function weightForm(one) {
    const weight = el("input", { type: "number", min: 0, max: 100, step: "any", required: true, value: Math.round(one.weight * 1000) / 10, "aria-label": `Share of the canary of ${one.name} in percent` });
    const form = el("form", { class: "inline" }, weight, "%", el("button", { class: "quiet" }, "Set share"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      weight.blur();
      does(() => send("POST", "/admin/v1/rollouts/weight", { name: one.name, weight: Number(weight.value) / 100 }), "The share is set.");
    });
    return form;
  }

  function beginForm() {
    const [name, stable, canary] = [1, 2, 3].map(() => el("input", { autocomplete: "off", maxlength: 200 }));
    name.required = canary.required = true;
    const [weight, shadow] = [5, 0].map((value) => el("input", { type: "number", min: 0, max: 100, step: "any", value, required: true }));
    const automatic = el("select", {}, [["abort", "Abort what is worse"], ["promote", "Abort or promote"], ["none", "Decide nothing"]].map(([value, title]) => el("option", { value }, title)));
    const form = el("form", { class: "row-form last", "aria-label": "New rollout" },
      field("Name", name, "that requests use"), field("Canary", canary, "the new model"), field("Stable", stable, "empty: the model of that name"),
      field("Share in %", weight), field("Copied in %", shadow, "of the stable version's requests"), field("By itself", automatic), el("button", { class: "strong" }, "Start rollout"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const body = { name: name.value.trim(), canary: canary.value.trim(), weight: Number(weight.value) / 100, shadow: Number(shadow.value) / 100, automatic: automatic.value };
      if (stable.value.trim()) body.stable = stable.value.trim();
      does(() => send("POST", "/admin/v1/rollouts/start", body), "The rollout begins.");
    });
    return form;
  }

  begin.body.append(beginForm());
  return { node, ...poll(load, EVERY_MS, away) };
}

/** Where it is on its way. */
function steps(one) {
  const way = one.phase in BACK ? [STEPS[0], [one.phase, BACK[one.phase]]] : STEPS;
  return el("div", {}, el("ol", { class: "steps" }, way.map(([phase, title]) => el("li", { "aria-current": phase === one.phase && "step" },
    phase === one.phase ? badge(TONES[phase], title) : el("span", { class: "hint" }, title)))),
  el("p", { class: "hint" }, `${one.why || (one.phase === "running" ? "It goes on" : "No reason was given")}. Since ${date(one.changed_at)}; ${AUTOMATIC[one.automatic] ?? one.automatic}; ${STICKY[one.sticky] ?? one.sticky}.`));
}

const STICKY = { key: "a key stays on its side", session: "a session stays on its side", request: "each request is drawn by itself" };
const AUTOMATIC = { none: "decides nothing by itself", abort: "aborts by itself what is worse", promote: "aborts or promotes by itself" };

function shares(one, sums) {
  const sides = [["stable", one.stable, 1 - one.weight, one.stable_requests], ["canary", one.canary, one.weight, one.canary_requests]];
  return el("div", { class: "sides-of" }, sides.map(([side, model, share, requests]) => {
    const sum = sums.find(({ rollout }) => rollout === `${one.name}=${side}`);
    return el("div", {}, el("h3", { class: "sub" }, `${words(side)}: ${model}`), meter(share, `${side}: ${percent(share)}`, side === "canary" ? "warn" : ""),
      el("div", { class: "facts" }, fact("share", percent(share)), fact("requests of the trial", count(requests)), fact("cost in 30 days", sum ? usd(sum.cost_usd) : "–"),
        fact("rated", sum?.rated ? `${percent(sum.mean_score)} by ${count(sum.rated)}` : "–"), side === "canary" && one.shadow > 0 && fact("copied to it", percent(one.shadow))));
  }));
}

/** How strongly each fault is suspected: a full bar is enough for an abort. */
function evidence(one) {
  const seen = Object.entries(one.evidence);
  if (!seen.length) return [el("p", { class: "hint" }, "Nothing was seen of it here yet.")];
  const verdict = { abort: badge("bad", "worse"), promote: badge("good", "not worse"), continue: badge("muted", "not decided") }[one.verdict] ?? badge("muted", one.verdict);
  return [el("h3", { class: "sub" }, "Evidence of faults ", verdict),
    el("ul", { class: "evidence" }, seen.map(([fault, strength]) => {
      const told = one.faults.includes(fault) ? "shown" : strength <= 0 ? "speaks against it" : `${percent(strength)} of what an abort takes`;
      return el("li", {}, el("span", {}, FAULTS[fault] ?? words(fault)), meter(strength, `${FAULTS[fault] ?? words(fault)}: ${told}`, strength >= 1 ? "bad" : strength >= 0.5 ? "warn" : "good"),
        el("span", { class: "hint" }, told + (one.unproven.includes(fault) ? "; not yet excluded" : "")));
    }))];
}
