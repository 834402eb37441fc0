// The live page: what the gateway does now, from a stream that sends its whole state every second.

import { Chart } from "./charts.js";
import { badge, el, fact, meter, panel, refill, row, svg, table, wholeRow } from "./dom.js";
import { amount, count, percent, span, time, words } from "./format.js";
import { scalingPanel } from "./scaling.js";
import { events, Refusal, request } from "./server.js";

const KEPT = 600;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
const CELLS = 160;
const TENANT_TONES = 5;
const STAGES = [
  ["arriving", "Arriving", "read, identified, tokenised, admitted"],
  ["queued", "Queued", "waits for credits of a replica"],
  ["prefilling", "Prefill", "sent to a replica, no token yet"],
  ["decoding", "Decoding", "is being answered"],
];
const REPLICAS = [["Model"], ["Replica"], ["Health"], ["Requests", true], ["Places free", true], ["KV tokens free", true], ["Share", true]];
const TENANTS = [["Tenant"], ["Waiting", true], ["Running", true], ["Ended", true], ["Refused", true], ["Tokens", true], ["Limits"]];
const REFUSALS = [["Last"], ["Times", true], ["Tenant"], ["Model"], ["Status", true], ["Why"], ["Come back", true]];

export function livePage(me, connection) {
  const admin = me.scopes.includes("admin");
  const stale = el("p", { class: "banner", role: "alert", hidden: true });
  const path = el("ol", { class: "path" });
  const charts = [
    new Chart("Time to first token", [
      { name: "median", colour: "accent", of: (point) => point.ttft_s?.[0] ?? null },
      { name: "p95", colour: "warn", of: (point) => point.ttft_s?.[1] ?? null },
    ], span),
    new Chart("Time between tokens", [
      { name: "median", colour: "accent", of: (point) => point.itl_s?.[0] ?? null },
      { name: "p95", colour: "warn", of: (point) => point.itl_s?.[1] ?? null },
    ], span),
    new Chart("Requests here", [
      { name: "waiting", colour: "warn", area: true, of: (point) => point.waiting },
      { name: "running", colour: "accent", area: true, of: (point) => point.running },
    ], count),
    new Chart("Requests ended each second", [
      { name: "finished", colour: "good", area: true, of: (point) => point.ended.finished ?? 0 },
      { name: "refused", colour: "warn", of: (point) => point.ended.refused ?? 0 },
      { name: "failed", colour: "bad", of: (point) => point.ended.failed ?? 0 },
      { name: "left", colour: "muted", of: (point) => point.ended.cancelled ?? 0 },
    ], count),
  ];
  const findings = panel("What holds requests up", { wide: true, note: "of the last seconds" });
  const queues = panel("Queue");
  const engines = panel("Batch and KV cache");
  const cache = panel("Cache of answers", { wide: true, note: "since the start" });
  const replicas = panel("Replicas", { wide: true });
  const scaling = admin && scalingPanel();
  const tenants = panel("Tenants", { wide: true, note: "use against limits" });
  const refusals = panel("Last refusals", { wide: true });
  const tables = { replicas: table("Replicas", REPLICAS), tenants: table("Tenants", TENANTS), refusals: table("Last refusals", REFUSALS) };
  for (const [name, part] of Object.entries({ replicas, tenants, refusals })) part.body.append(tables[name].node);

  const node = el("div", { class: "live", "aria-busy": "true" }, stale,
    el("section", { "aria-label": "Requests in each stage", class: "stages" }, path),
    el("section", { class: "charts", "aria-label": "Charts" }, charts.map((chart) => chart.node)),
    el("div", { class: "grid" }, findings.node, queues.node, engines.node, cache.node, replicas.node, scaling && scaling.node, admin && tenants.node, refusals.node));

  let points = [];
  let ended = false;
  let stop = new AbortController();

  function state(now) {
    node.removeAttribute("aria-busy");
    stale.hidden = true;
    if (!(points.at(-1)?.at >= now.point.at)) points.push(now.point);
    points = points.slice(-KEPT);
    if (!document.hidden) for (const chart of charts) chart.set(points);
    showPath(path, now);
    refill(findings.body, JSON.stringify(now.findings), () => findingsOf(now.findings));
    refill(queues.body, JSON.stringify([now.queues]), () => now.queues.map((queue) => queueOf(queue, admin)));
    refill(engines.body, JSON.stringify(now.engines), () => enginesOf(now.engines));
    cache.node.hidden = !Object.keys(now.cache.lookups).length;
    refill(cache.body, JSON.stringify(now.cache), () => cacheOf(now.cache));
    refill(tables.replicas.rows, JSON.stringify(now.replicas), () => now.replicas.map(replicaOf));
    refill(tables.tenants.rows, JSON.stringify([now.tenants, now.limits_known]), () => tenantsOf(now));
    refill(tables.refusals.rows, JSON.stringify(now.refusals), () => refusalsOf(now.refusals));
    const away = Object.entries(now.stores).filter(([, up]) => !up).map(([name]) => name);
    if (away.length) warn(`Not reachable: ${away.join(", ")}. Requests run on what is known without it.`);
  }

  function warn(text) {
    stale.hidden = false;
    if (stale.textContent !== text) stale.textContent = text;
  }

  async function follow() {
    let failures = 0;
    while (!ended) {
      connection(failures ? "lost" : "wait");
      try {
        const response = await request("GET", "/admin/v1/live", { headers: { accept: "text/event-stream" }, signal: stop.signal });
        for await (const event of events(response)) {
          if (event.kind === "history") points = JSON.parse(event.data);
          else if (event.kind === "state") {
            failures = 0;
            connection("ok");
            node.classList.remove("stale");
            state(JSON.parse(event.data));
          }
        }
      } catch (error) {
        if (ended) return;
        if (error instanceof Refusal && error.status < 429) return warn(error.message);
      }
      if (ended) return;
      failures += 1;
      connection("lost");
      node.classList.add("stale");
      if (points.length) warn(`The server stopped answering; what you see is of ${time(points.at(-1).at)}. Trying again…`);
      else warn("The server does not answer. Trying again…");
      await new Promise((resolve) => setTimeout(resolve, Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** failures)));
    }
  }

  return {
    node,
    enter() {
      if (scaling) scaling.enter();
      follow();
    },
    leave() {
      ended = true;
      stop.abort();
      if (scaling) scaling.leave();
      for (const chart of charts) chart.end();
    },
  };
}

function showPath(place, now) {
  const most = Math.max(1, ...STAGES.map(([name]) => now.path[name]));
  const done = now.point.ended;
  refill(place, JSON.stringify([now.path, done, now.draining]), () => [
    ...STAGES.map(([name, title, meaning]) => el("li", { class: `stage ${name}` },
      el("span", { class: "name" }, title), el("b", {}, count(now.path[name])),
      meter(now.path[name] / most, `${title}: ${now.path[name]}`), el("span", { class: "hint" }, meaning))),
    el("li", { class: "stage out" },
      el("span", { class: "name" }, now.draining ? "Draining" : "Last second"),
      el("dl", {},
        ...[["finished", "good"], ["refused", "warn"], ["failed", "bad"], ["cancelled", "muted"]].flatMap(([name, tone]) => [
          el("dt", {}, name === "cancelled" ? "left" : name), el("dd", { class: done[name] ? tone : "" }, count(done[name] ?? 0))]))),
  ]);
}

/** What `maitred doctor` says, from the same rules. */
function findingsOf(all) {
  if (!all) return [el("p", { class: "empty" }, "Looking: this takes some seconds.")];
  if (!all.length) return [el("p", { class: "empty" }, "Nothing does.")];
  return [el("ol", { class: "findings" }, all.map((one) => el("li", {},
    el("h3", {}, badge("warn", words(one.kind)), one.where && el("span", { class: "note" }, one.where)),
    el("p", {}, one.summary), one.evidence.map((line) => el("p", { class: "hint" }, line)), el("p", { class: "remedy" }, one.remedy))))];
}

function queueOf(queue, admin) {
  const waiting = Object.values(queue.waiting).reduce((sum, each) => sum + each, 0);
  const most = Math.max(1, ...Object.values(queue.waiting));
  const classes = Object.entries(queue.waiting).map(([name, number]) => el("li", {},
    el("span", {}, words(name)), meter(number / most, `${number} wait as ${name}`, number ? "warn" : ""),
    el("b", {}, count(number)), el("span", { class: "hint" }, `one more waits ${span(queue.predicted_wait_s[name])}`)));
  const here = queue.tenants.filter((each) => each.waiting || each.running);
  const busiest = Math.max(1, ...here.map((each) => each.waiting + each.running));
  return el("article", { class: "queue" },
    el("h3", {}, queue.model, el("span", { class: "note" }, `${count(waiting)} wait, ${count(queue.running)} run`)),
    el("ul", { class: "bars" }, classes),
    here.length > 0 && el("h4", {}, "By tenant"),
    here.length > 0 && el("ul", { class: "bars tenants" }, here.map((each) => el("li", {},
      el("span", { class: "clip" }, each.tenant),
      meter((each.waiting + each.running) / busiest, `${each.tenant}: ${each.waiting} wait, ${each.running} run`, each.waiting ? "warn" : ""),
      el("span", { class: "hint" }, `${count(each.waiting)} wait, ${count(each.running)} run`)))),
    !admin && el("p", { class: "hint" }, "Who waits is shown to administrators."));
}

function enginesOf(all) {
  if (!all.length) return [el("p", { class: "empty" }, "No engine of maitred's own: servers of others keep their batches to themselves.")];
  return all.map(engineOf);
}

function engineOf(engine) {
  const health = !engine.up ? badge("bad", "not connected") : engine.asleep ? badge("muted", "asleep") : badge("good", "up");
  const places = engine.running + engine.free_sequences;
  const found = engine.prompt_tokens ? engine.cached_tokens / engine.prompt_tokens : 0;
  return el("article", { class: "engine" },
    el("h3", {}, engine.model, el("span", { class: "note" }, engine.replica), health),
    el("div", { class: "facts" },
      fact("in the batch", `${count(engine.running)} of ${count(places)}`), fact("wait for a place", count(engine.waiting)),
      fact("readers behind", count(engine.paused)), fact("preemptions", count(engine.preemptions)),
      fact("prompt from cache", percent(found)), fact("a step", span(engine.steps ? engine.step_s / engine.steps : null))),
    engine.blocks > 0 && kvMap(engine));
}

/** What the cache of answers did for requests; hidden where it was never asked. */
function cacheOf(cache) {
  const { hit = 0, coalesced = 0, semantic = 0, partial = 0, miss = 0, bypass = 0 } = cache.lookups;
  const served = hit + coalesced + semantic, asked = served + partial + miss;
  const share = asked ? served / asked : 0;
  return [el("article", { class: "cache" }, el("div", { class: "facts" },
    fact("served without computing", percent(share)), fact("saved tokens", count(cache.saved_tokens)), fact("from the cache", count(hit)),
    fact("shared while made", count(coalesced)), fact("from a similar question", count(semantic)), fact("computed in part", count(partial)), fact("computed", count(miss)), fact("not asked", count(bypass))),
    meter(share, `Served without computing: ${percent(share)}`, "good"))];
}

/** The KV cache as cells: each stands for the same number of blocks, in the order of the legend. */
function kvMap(engine) {
  const held = engine.used_blocks - engine.pinned_blocks;
  const named = engine.held.slice(0, TENANT_TONES).map((each, number) => [`t${number + 1}`, each.tenant, each.tokens / engine.block_tokens]);
  const sum = named.reduce((total, [, , blocks]) => total + blocks, 0);
  // What requests were given credit for is more than they hold yet: shown is each one's part of what is held.
  const scale = sum > 0 ? Math.min(1, held / sum) : 0;
  const parts = named.map(([tone, name, blocks]) => [tone, name, Math.round(blocks * scale)]);
  const rest = held - parts.reduce((total, [, , blocks]) => total + blocks, 0);
  const all = [...parts, ["used", parts.length ? "held, others" : "held", Math.max(0, rest)], ["pinned", "pinned", engine.pinned_blocks],
    ["cached", "cached, free to take", engine.cached_blocks],
    ["free", "free", engine.blocks - engine.used_blocks - engine.cached_blocks]].filter(([tone, , blocks]) => blocks > 0 || tone === "free");
  const told = all.map(([, name, blocks]) => `${name} ${blocks}`).join(", ");
  const perRow = 40;
  const box = svg("svg", { viewBox: `0 0 ${perRow * 10} ${(CELLS / perRow) * 10}`, class: "map", role: "img", "aria-label": `KV cache, ${engine.blocks} blocks: ${told}.` });
  let below = 0;
  let cell = 0;
  for (const [tone, , blocks] of all) {
    below += blocks;
    // What is there at all is seen: at least one cell.
    const upto = Math.min(CELLS, Math.max(blocks > 0 && tone !== "free" ? cell + 1 : cell, Math.round((below / engine.blocks) * CELLS)));
    for (; cell < upto; cell += 1) box.append(svg("rect", { x: (cell % perRow) * 10 + 1, y: Math.floor(cell / perRow) * 10 + 1, width: 8, height: 8, rx: 1.5, class: tone }));
  }
  return el("div", { class: "kv" }, box, el("ul", { class: "legend" }, all.map(([tone, name, blocks]) =>
    el("li", { class: "key" }, el("i", { class: `swatch ${tone}` }), el("span", { class: "clip" }, name), el("b", {}, count(blocks))))));
}

function replicaOf(one) {
  const health = one.ready ? badge("good", "ready") : one.state === "serving" ? badge("bad", "not ready") : badge("muted", one.state);
  const { slots, kv_tokens: tokens } = one.credits;
  const left = (credit) => (credit ? [`${count(Math.max(0, credit.free))} of ${count(credit.total)}`] : "–");
  return row(REPLICAS, [one.model, [one.replica, one.kind === "upstream" && el("span", { class: "hint" }, " another server"), one.region && el("span", { class: "hint" }, ` ${one.region}`)],
    [health, one.outage && el("span", { class: "hint" }, ` ${one.outage}`)], count(one.requests), left(slots), left(tokens), percent(one.weight)]);
}

function tenantsOf(now) {
  if (!now.limits_known) return [wholeRow(TENANTS, "The counters do not answer, so nobody knows how far limits are used.")];
  if (!now.tenants.length) return [wholeRow(TENANTS, "Nobody has been here yet.")];
  return now.tenants.map((one) => row(TENANTS, [
    one.tenant === "*" ? "Everybody" : one.tenant, count(one.waiting), count(one.running),
    one.tenant === "*" ? "–" : count(one.requests), one.tenant === "*" ? "–" : count(one.refused),
    one.tenant === "*" ? "–" : count(one.prompt_tokens + one.output_tokens),
    one.limits.length ? el("ul", { class: "limits" }, one.limits.map(limitOf)) : el("span", { class: "hint" }, "none"),
  ]));
}

export function limitOf(limit) {
  const share = limit.value ? limit.used / limit.value : 0;
  const told = `${words(limit.kind)}${limit.model ? ` of ${limit.model}` : ""}: ${amount(limit.kind, limit.used)} of ${amount(limit.kind, limit.value)}`;
  return el("li", {}, el("span", { class: "hint" }, told), meter(share, told, share >= 1 ? "bad" : share >= 0.8 ? "warn" : "good"));
}

function refusalsOf(all) {
  if (!all.length) return [wholeRow(REFUSALS, "None so far.")];
  return all.map((one) => row(REFUSALS, [time(one.at), count(one.count), one.tenant || "–", one.model || "–", String(one.status),
    [el("code", {}, one.code || "–"), one.limit && el("span", {}, ` ${words(one.limit).toLowerCase()}`), one.message && el("span", { class: "hint" }, ` ${one.message} ${one.request_id}`)],
    one.retry_after_s === null ? "–" : `in ${span(one.retry_after_s)}`]));
}
