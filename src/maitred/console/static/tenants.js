// Tenants: organisations and their teams, what each used, and, of one, its budgets, limits, keys and teams.

import { ask, attempt, badge, el, fact, field, longList, meter, panel, row, table, wholeRow } from "./dom.js";
import { count, date, quoted, usd, words } from "./format.js";
import { keysPanel, limitsPanel } from "./keys.js";
import { limitOf } from "./live.js";
import { get, pageOf, send } from "./server.js";

const TENANTS = [["Tenant"], ["Team of"], ["State"], ["Requests", true], ["Tokens", true], ["Cost", true], [""]];
const BUDGETS = [["Whose"], ["Budget"], ["Used"], ["Charged", true], ["Reserved", true], ["Left", true], ["Begins anew"]];
const USED = [["Day"], ["Model"], ["Requests", true], ["Prompt tokens", true], ["Answer tokens", true], ["Cost", true]];
const SINCE = "-30d";
const NO_USE = { requests: 0, prompt_tokens: 0, output_tokens: 0, cost_usd: 0 };

/** All tenants, or the one that the address names. */
export const tenantsPage = (me, _, id) => (id ? tenantPage(me, id) : tenantListPage());

/** Blocks a tenant, or lets it in again, once the user has confirmed it. Returns whether it was done. */
async function setBlocked(tenant, blocked) {
  const name = tenant.name || tenant.id;
  const text = blocked ? "Its keys and those of its teams are refused from now on. Nothing is deleted." : "Its keys and those of its teams are accepted again.";
  const answer = await ask(`${blocked ? "Block" : "Unblock"} ${name}?`, el("p", {}, text),
    [["Cancel", ""], blocked ? ["Block", "yes", "danger strong"] : ["Unblock", "yes", "strong"]]);
  if (answer !== "yes") return false;
  await send("PATCH", `/admin/v1/tenants/${quoted(tenant.id)}`, { disabled: blocked });
  return true;
}

const blockButton = (tenant, onClick) => el("button", {
  type: "button", class: tenant.disabled ? "quiet" : "quiet danger", "aria-label": `${tenant.disabled ? "Unblock" : "Block"} ${tenant.id}`, onclick: onClick,
}, tenant.disabled ? "Unblock" : "Block");
const stateBadge = (tenant) => (tenant.disabled ? badge("bad", "blocked") : badge("good", "active"));
const link = (id, text = id) => el("a", { href: `#tenants/${quoted(id)}` }, text);

function tenantListPage() {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const { node: part, body, hint } = panel("Tenants", { wide: true });
  const list = longList(table("Tenants", TENANTS), TENANTS, tenantRow, { empty: "There are no tenants." });
  let used = new Map();

  async function load() {
    const [tenants, [sums]] = await Promise.all([pageOf("/admin/v1/tenants"), pageOf(`/admin/v1/usage?group_by=tenant&start=${SINCE}`, 500)]);
    used = new Map(sums.map((sum) => [sum.tenant, sum]));
    hint.textContent = "use of the last 30 days, by each one's own keys";
    list.show(...tenants);
  }

  function tenantRow(tenant) {
    const sum = used.get(tenant.id) ?? NO_USE;
    return row(TENANTS, [[link(tenant.id), tenant.name && el("span", { class: "hint" }, ` ${tenant.name}`)],
      tenant.parent ? link(tenant.parent) : el("span", { class: "hint" }, "organisation"), stateBadge(tenant),
      count(sum.requests), count(sum.prompt_tokens + sum.output_tokens), usd(sum.cost_usd),
      blockButton(tenant, () => attempt(fault, async () => {
        if (!await setBlocked(tenant, !tenant.disabled)) return;
        said.textContent = tenant.disabled ? "It is unblocked." : "It is blocked.";
        await load();
      }))]);
  }

  function form() {
    const id = el("input", { required: true, autocomplete: "off", maxlength: 63, pattern: "[a-z0-9][a-z0-9_\\-]*", title: "lower-case letters, digits, - and _" });
    const name = el("input", { maxlength: 200, autocomplete: "off" });
    const parent = el("input", { autocomplete: "off", placeholder: "none" });
    const made = el("form", { class: "row-form", "aria-label": "New tenant" },
      field("Id", id, "does not change"), field("Name", name), field("Team of", parent, "empty: an organisation"), el("button", { class: "strong" }, "Create tenant"));
    made.addEventListener("submit", (event) => {
      event.preventDefault();
      attempt(fault, async () => {
        await send("POST", "/admin/v1/tenants", { id: id.value.trim(), name: name.value.trim(), parent: parent.value.trim() || null });
        said.textContent = "The tenant is made.";
        made.reset();
        await load();
      });
    });
    return made;
  }

  body.append(fault, said, form(), list.node);
  return { node: el("div", { class: "grid single" }, part), enter: () => attempt(fault, load) };
}

function tenantPage(me, id) {
  const fault = el("p", { class: "fault", role: "alert" });
  const head = panel("Tenant", { wide: true });
  const teams = panel("Teams", { wide: true });
  const budgets = panel("Budgets", { wide: true, note: "that hold for it" });
  const now = panel("Limits now", { wide: true, note: "since it is here, or was lately" });
  const used = panel("Use by day and model", { wide: true, note: "last 30 days" });
  const lists = { budgets: table("Budgets", BUDGETS), used: longList(table("Use by day and model", USED), USED, usedRow, { empty: "It has used nothing yet." }) };
  const keys = keysPanel(me, id), limits = limitsPanel(`tenant:${id}`);
  head.body.append(fault);
  const facts = head.body.appendChild(el("div", {}));
  budgets.body.append(lists.budgets.node);
  used.body.append(lists.used.node);
  const node = el("div", { class: "grid single" }, el("p", {}, el("a", { href: "#tenants" }, "All tenants")),
    head.node, budgets.node, now.node, keys.node, limits.node, teams.node, used.node);

  async function load() {
    const tenant = await get(`/admin/v1/tenants/${quoted(id)}`);
    const whose = tenant.parent ? "tenant" : "organisation";
    const [[all], [below], uses, [sums], live] = await Promise.all([
      pageOf(`/admin/v1/budgets?subject=${quoted(`tenant:${id}`)}`), pageOf(`/admin/v1/tenants?parent=${quoted(id)}`, 500),
      pageOf(`/admin/v1/usage?group_by=day,model&start=${SINCE}&${whose}=${quoted(id)}`, 500), pageOf(`/admin/v1/usage?start=${SINCE}&${whose}=${quoted(id)}`),
      get("/admin/v1/live")]);
    facts.replaceChildren(...described(tenant, sums[0] ?? NO_USE));
    lists.budgets.rows.replaceChildren(...(all.length ? all.map(budgetRow) : [wholeRow(BUDGETS, "No budget holds for it: set a limit in USD below.")]));
    const limited = live.tenants.find((one) => one.tenant === id)?.limits ?? [];
    now.node.hidden = !limited.length;
    now.body.replaceChildren(el("ul", { class: "limits" }, limited.map(limitOf)));
    teams.node.hidden = !below.length;
    teams.body.replaceChildren(el("ul", { class: "chips" }, below.map((team) => el("li", {}, link(team.id), " ", team.disabled && badge("bad", "blocked")))));
    lists.used.show(...uses);
  }

  function described(tenant, sum) {
    return [el("h3", {}, tenant.name || tenant.id, " ", stateBadge(tenant), tenant.parent && el("span", { class: "hint" }, " team of ", link(tenant.parent))),
      el("div", { class: "facts" }, fact("id", tenant.id), fact("models", tenant.models?.join(", ") || "all"), fact("regions", tenant.regions.join(", ") || "all"),
        fact("share of service", count(tenant.weight)), fact("requests in 30 days", count(sum.requests)), fact("cost in 30 days", usd(sum.cost_usd))),
      el("div", { class: "actions" }, blockButton(tenant, () => attempt(fault, async () => { if (await setBlocked(tenant, !tenant.disabled)) await load(); })))];
  }

  return { node, enter: () => Promise.all([attempt(fault, load), keys.enter(), limits.enter()]) };
}

function budgetRow(budget) {
  const share = budget.limit_usd ? (budget.charged_usd + budget.reserved_usd) / budget.limit_usd : 1;
  const told = `${usd(budget.charged_usd + budget.reserved_usd)} of ${usd(budget.limit_usd)}`;
  return row(BUDGETS, [budget.subject === "*" ? "everybody" : budget.subject.replace(":", " "),
    words(budget.kind) + (budget.model ? ` of ${budget.model}` : "") + (budget.hard ? "" : " (soft)"),
    el("span", { class: "bound" }, el("span", { class: "hint" }, told), meter(share, told, share >= 1 ? "bad" : share >= 0.8 ? "warn" : "good")),
    usd(budget.charged_usd), usd(budget.reserved_usd), usd(budget.remaining_usd), budget.resets_at ? date(budget.resets_at) : "never"]);
}

const usedRow = (sum) => row(USED, [sum.day, sum.model, count(sum.requests), count(sum.prompt_tokens), count(sum.output_tokens), usd(sum.cost_usd)]);
