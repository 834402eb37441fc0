// Models and the replicas that run them: what is in memory, what sleeps, and the orders for both.

import { ask, attempt, badge, el, longList, panel, refill, row, table, wholeRow } from "./dom.js";
import { bytes, count, percent, span } from "./format.js";
import { get, poll, Refusal, send } from "./server.js";

const EVERY_MS = 3_000;
const MODELS = [["Model"], ["Runs"], ["State"], ["Memory", true], ["Replicas"], ["Requests", true], ["Loads", true], [""]];
const REPLICAS = [["Model"], ["Replica"], ["State"], ["Region"], ["Requests", true], ["KV cache free", true], ["Round trip", true], [""]];
const TONES = { serving: "good", awake: "good", ready: "good", "not ready": "bad", held: "warn", away: "warn" };
const ORDERS = {
  load: ["Load", "It is loaded as if a request waited for it. Others that are idle may have to go.", "strong"],
  unload: ["Unload", "It gets nothing new, its running answers end, and its process is ended. The next request loads it again, unless it is held.", "danger strong"],
  sleep: ["Sleep", "It gets nothing new, its running answers end, and its memory is given back. The next request wakes it.", "strong"],
  wake: ["Wake", "It takes its memory again, ahead of its next request.", "strong"],
  pin: ["Pin", "It is loaded and stays in memory, whoever else waits.", "strong"],
  unpin: ["Unpin", "It may go when others need its room.", "strong"],
};
const DOES = { out: ["load", "pin"], held: ["load", "pin"], waiting: [], loading: [], serving: ["sleep", "unload"], awake: ["sleep"], asleep: ["wake"], waking: [], draining: [], unloading: [], away: [] };

export function modelsPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const away = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const parts = {
    chat: panel("Chat models", { wide: true }), encoder: panel("Encoders", { wide: true, note: "give vectors for texts" }),
    name: panel("Other names", { wide: true, note: "lead to one of the models above: rollouts, automatic choice" }),
  };
  const lists = Object.fromEntries(Object.entries(parts).map(([kind, { node }]) => [kind, table(node.querySelector("h2").textContent, MODELS)]));
  for (const [kind, { body }] of Object.entries(parts)) body.append(lists[kind].node);
  const replicas = panel("Replicas", { wide: true });
  const replicaTable = table("Replicas", REPLICAS);
  const replicaList = longList(replicaTable, REPLICAS, replicaRow, { empty: "No model has a replica now." });
  replicas.body.append(replicaList.node);
  const node = el("div", { class: "grid single" }, away, fault, said, ...Object.values(parts).map((part) => part.node), replicas.node);
  let drawn = "";

  async function load() {
    const [loadable, sleepers, running, listed] = await Promise.all([
      get("/admin/v1/models"), get("/admin/v1/models/sleep"), get("/admin/v1/replicas"),
      get("/v1/models").catch((error) => { if (error instanceof Refusal) return { data: [] }; throw error; }),
    ]);
    const all = modelsOf(loadable.data, sleepers.data, running.data, listed.data);
    for (const [kind, { node: part, hint }] of Object.entries(parts)) {
      const some = all.filter((model) => model.kind === kind);
      part.hidden = kind !== "chat" && !some.length;
      refill(lists[kind].rows, JSON.stringify(some.map(({ idle, ...shown }) => shown)), () => (some.length ? some.map(modelRow) : [wholeRow(MODELS, "No model is served.")]));
      if (kind === "chat") hint.textContent = loadable.budget_bytes === null ? "" : `on demand: ${bytes(loadable.taken_bytes)} of ${bytes(loadable.budget_bytes)} in memory`;
    }
    const key = JSON.stringify(running.data.map(({ weight, kv_free: free, ...shown }) => [shown, percent(free ?? 0)]));
    if (key !== drawn) replicaList.show(running.data);
    drawn = key;
  }

  function modelRow(model) {
    const orders = model.sleeps || model.loads !== null ? [...DOES[model.state] ?? [], ...(model.pinned ? ["unpin"] : [])] : [];
    const allowed = orders.filter((verb) => (verb === "sleep" || verb === "wake" ? model.sleeps && !(model.pinned && verb === "sleep") : !(model.pinned && verb === "unload")));
    return row(MODELS, [[model.name, model.told && el("span", { class: "hint" }, ` ${model.told}`)], model.runs,
      [badge(TONES[model.state] ?? "muted", model.state), model.pinned && el("span", { class: "hint" }, " pinned"), model.soon && el("span", { class: "hint" }, ` ${model.soon}`)],
      bytes(model.bytes), [count(model.replicas), model.regions && el("span", { class: "hint" }, ` ${model.regions}`)], count(model.requests), model.loads === null ? "–" : count(model.loads),
      allowed.map((verb) => el("button", { type: "button", class: verb === "unload" ? "quiet danger" : "quiet", "aria-label": `${ORDERS[verb][0]} ${model.name}`, onclick: () => order(verb, model.name) }, ORDERS[verb][0]))]);
  }

  const order = (verb, model) => attempt(fault, async () => {
    const [title, text, tone] = ORDERS[verb];
    const hold = verb === "unload" ? [["Unload and hold", "hold", "danger"]] : [];
    const answer = await ask(`${title} ${model}?`, el("p", {}, text), [["Cancel", ""], ...hold, [title, "yes", tone]]);
    if (!answer) return;
    await send("POST", `/admin/v1/models/${verb}`, answer === "hold" ? { model, hold: true } : { model });
    said.textContent = `${title} ${model}: it is ordered.`;
    await load();
  });

  function replicaRow(replica) {
    const { model, replica: name, state } = replica;
    const shown = replica.ready ? badge("good", "ready") : state === "serving" ? badge("bad", "not ready") : badge("muted", state);
    const [verb, title] = state === "serving" ? ["drain", "Drain"] : ["resume", "Resume"];
    return row(REPLICAS, [model, [name, replica.kind === "upstream" && el("span", { class: "hint" }, " another server")],
      [shown, replica.outage && el("span", { class: "hint" }, ` ${replica.outage}`)], replica.region ?? "–", count(replica.requests),
      replica.kv_free === null ? "–" : percent(replica.kv_free), replica.round_trip_ms === null ? "–" : span(replica.round_trip_ms / 1000),
      el("button", { type: "button", class: "quiet", "aria-label": `${title} ${name} of ${model}`, onclick: () => attempt(fault, async () => {
        const text = verb === "drain" ? "It gets nothing new, and what runs there ends." : "It gets requests again.";
        if (await ask(`${title} ${name}?`, el("p", {}, text), [["Cancel", ""], [title, "yes", "strong"]]) !== "yes") return;
        await send("POST", `/admin/v1/replicas/${verb}`, { replica: name, model });
        await load();
      }) }, title)]);
  }

  return { node, ...poll(load, EVERY_MS, away) };
}

/** Every model as one entry, from what the lists know of it. */
function modelsOf(loadable, sleepers, running, listed) {
  const known = [loadable, sleepers, running].flat().map(({ model }) => model);
  return [...new Set([...known, ...listed.map(({ id }) => id)])].sort().map((name) => {
    const onDemand = loadable.find(({ model }) => model === name);
    const sleeper = sleepers.find(({ model }) => model === name);
    const replicas = running.filter(({ model }) => model === name);
    const entry = listed.find(({ id }) => id === name);
    const kind = entry?.embedding_dimensions ? "encoder" : known.includes(name) ? "chat" : "name";
    const ready = entry?.ready ?? replicas.some((replica) => replica.ready);
    return {
      name, kind,
      runs: onDemand ? "on demand" : sleeper ? "always" : kind === "name" ? "by another name" : replicas.some((replica) => replica.kind === "upstream") ? "another server" : "always",
      state: onDemand?.state ?? (sleeper?.state === "awake" && !ready ? "not ready" : sleeper?.state) ?? (ready ? "ready" : "not ready"),
      sleeps: Boolean(sleeper), pinned: onDemand?.pinned ?? false,
      soon: onDemand && onDemand.state !== "serving" && onDemand.ready_in_s ? `serves in ${span(onDemand.ready_in_s)}` : sleeper?.state === "asleep" ? `wakes in ${span(sleeper.wakes_in_s)}` : "",
      told: [entry?.max_model_len && `${count(entry.max_model_len)} tokens`, entry?.embedding_dimensions && `${count(entry.embedding_dimensions)} dimensions`].filter(Boolean).join(", "),
      bytes: onDemand?.measured_bytes ?? sleeper?.measured_bytes ?? null,
      replicas: replicas.length, regions: [...new Set(replicas.map(({ region }) => region).filter(Boolean))].join(", "),
      requests: replicas.reduce((sum, replica) => sum + replica.requests, 0), loads: onDemand?.loads ?? null,
    };
  });
}
