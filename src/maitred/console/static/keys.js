// Keys and limits, through the administration's API like everybody else.

import { ask, attempt, el, field, longList, panel, row, table } from "./dom.js";
import { amount, date, quoted, words } from "./format.js";
import { isThere, pageOf, send } from "./server.js";

const KEYS = [["Name"], ["Key"], ["Tenant"], ["Scopes"], ["State"], ["Expires"], [""]];
const LIMITS = [["Who"], ["Kind"], ["Model"], ["Value", true], [""]];
const KINDS = ["requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "concurrent_requests",
  "concurrent_tokens", "context_tokens", "output_tokens", "usd_per_day", "usd_per_week", "usd_per_month", "usd_total"];
const SCOPES = ["inference", "metrics", "admin"];
const DAY_MS = 86_400_000;

const stateOf = (key) => (key.revoked ? "revoked" : key.expires_at && new Date(key.expires_at) < Date.now() ? "expired" : "active");

/** Keys and limits of all. */
export function keysPage(me) {
  const node = el("div", { class: "grid single" });
  const keys = keysPanel(me), limits = limitsPanel();
  node.append(keys.node, limits.node);
  return { node, enter: () => Promise.all([keys.enter(), limits.enter()]) };
}

/** Does something, says so, and looks at everything again; what went wrong is shown in `fault`. */
const does = (fault, said, load) => (work, done) => attempt(fault, async () => {
  const made = await work();
  said.textContent = done;
  await load();
  return made;
});

/** The keys of all, or of one tenant, to make and to end. */
export function keysPanel(me, tenantId = "") {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const tenantNames = el("datalist", { id: "tenant-names" });
  const keys = panel("Keys", { wide: true });
  const list = longList(table("Keys", KEYS), KEYS, keyRow, { empty: "There are no keys." });
  const doing = does(fault, said, load);
  let everybodyKnown = false;

  async function load() {
    const [[some, more], [tenants, others]] = await Promise.all([
      pageOf(`/admin/v1/keys${tenantId && `?tenant=${quoted(tenantId)}`}`), tenantId ? [[], null] : pageOf("/admin/v1/tenants", 500)]);
    tenantNames.replaceChildren(...tenants.map((tenant) => el("option", { value: tenant.id }, tenant.name)));
    everybodyKnown = !others;
    const active = some.filter((key) => stateOf(key) === "active").length;
    keys.hint.textContent = more ? `${active} of the first ${some.length} active` : `${active} active`;
    list.show(some, more);
  }

  function keyRow(key) {
    const state = stateOf(key);
    return row(KEYS, [key.name || el("span", { class: "hint" }, "no name"), el("code", {}, key.id), key.tenant, key.scopes.join(", "),
      el("span", { class: `badge ${state === "active" ? "good" : "muted"}` }, state), date(key.expires_at),
      !key.revoked && el("button", { type: "button", class: "quiet danger", "aria-label": `Revoke ${key.name || key.id}`, onclick: () => revoke(key) }, "Revoke")]);
  }

  async function revoke(key) {
    const own = key.id === me.key;
    const answer = await ask(`Revoke ${key.name || key.id}?`,
      el("p", {}, `It is refused from now on, and what runs under it is broken off. This cannot be undone.${own ? " It is the key that you are logged in with." : ""}`),
      [["Keep it", ""], ["Revoke", "yes", "danger strong"]]);
    if (answer === "yes") await doing(() => send("POST", `/admin/v1/keys/${quoted(key.id)}/revoke`), "The key is revoked.");
  }

  function keyForm() {
    const tenant = el("input", { list: "tenant-names", required: true, autocomplete: "off", pattern: "[a-z0-9][a-z0-9_\\-]*", value: tenantId || me.tenant, readonly: Boolean(tenantId) });
    const name = el("input", { maxlength: 200, autocomplete: "off" });
    const expires = el("input", { type: "number", min: 1, max: 3650, step: 1, placeholder: "never" });
    const scopes = SCOPES.map((scope) => [scope, el("input", { type: "checkbox", id: `scope-${scope}`, checked: scope === "inference" })]);
    const form = el("form", { class: "row-form", "aria-label": "New key" },
      field("Tenant", tenant, tenantId ? "" : "made if it does not exist"), field("Name", name), field("Expires in days", expires),
      el("fieldset", {}, el("legend", {}, "Scopes"), scopes.map(([scope, box]) => el("span", { class: "check" }, box, el("label", { for: box.id }, scope)))),
      el("button", { class: "strong" }, "Create key"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = {
        tenant: tenant.value.trim(), name: name.value.trim(), scopes: scopes.filter(([, box]) => box.checked).map(([scope]) => scope),
        expires_at: expires.value ? new Date(Date.now() + Number(expires.value) * DAY_MS).toISOString() : null,
      };
      const made = await doing(async () => {
        const known = tenantId || [...tenantNames.options].some((option) => option.value === body.tenant)
          || !everybodyKnown && await isThere(`/admin/v1/tenants/${quoted(body.tenant)}`);
        if (!known) await send("POST", "/admin/v1/tenants", { id: body.tenant });
        return send("POST", "/admin/v1/keys", body);
      }, "The key is made.");
      if (made) { name.value = ""; await showKey(made.key); }
    });
    return form;
  }

  async function showKey(key) {
    const shown = el("input", { readonly: true, value: key, class: "secret", onfocus: (event) => event.target.select() });
    const copied = el("span", { class: "hint", role: "status" });
    const copy = el("button", { type: "button", class: "quiet", onclick: async () => {
      try { await navigator.clipboard.writeText(key); copied.textContent = "Copied."; } catch { shown.focus(); copied.textContent = "Press Ctrl+C."; }
    } }, "Copy");
    await ask("Your new key", el("div", {}, el("p", {}, "This is the only time that it is shown. Keep it where secrets are kept."), field("Key", shown), copy, copied), [["I have it", "ok", "strong"]]);
  }

  keys.body.append(fault, said, tenantNames, keyForm(), list.node);
  return { node: keys.node, enter: () => doing(() => Promise.resolve(), "") };
}

/** The limits of all, or of one subject, to set, to change and to delete. */
export function limitsPanel(subjectId = "") {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const limits = panel("Limits", { wide: true });
  const list = longList(table("Limits", LIMITS), LIMITS, limitRow, { empty: "Nothing is limited." });
  const doing = does(fault, said, load);

  async function load() {
    list.show(...await pageOf(`/admin/v1/limits${subjectId && `?subject=${quoted(subjectId)}`}`));
  }

  function limitRow(limit) {
    return row(LIMITS, [limit.subject === "*" ? "Everybody together" : limit.subject, words(limit.kind) + (limit.hard ? "" : " (soft)"), limit.model ?? "all",
      amount(limit.kind, limit.value) + (limit.burst ? `, burst ${amount(limit.kind, limit.burst)}` : ""),
      [el("button", { type: "button", class: "quiet", "aria-label": `Change ${words(limit.kind)} of ${limit.subject}`, onclick: () => change(limit) }, "Change"),
        el("button", { type: "button", class: "quiet danger", "aria-label": `Delete ${words(limit.kind)} of ${limit.subject}`, onclick: () => remove(limit) }, "Delete")]]);
  }

  async function change(limit) {
    const value = el("input", { type: "number", min: 0, step: "any", required: true, value: limit.value });
    const answer = await ask(`${words(limit.kind)} of ${limit.subject}`, field("New value", value), [["Cancel", ""], ["Save", "yes", "strong"]]);
    if (answer !== "yes" || value.value === "") return;
    const { subject, kind, model, burst, hard } = limit;
    await doing(() => send("PUT", `/admin/v1/limits/${quoted(limit.id)}`, { subject, kind, model, burst, hard, value: Number(value.value) }), "The limit is changed.");
  }

  async function remove(limit) {
    const answer = await ask("Delete this limit?", el("p", {}, `${words(limit.kind)} of ${limit.subject}. It stops holding at once.`), [["Keep it", ""], ["Delete", "yes", "danger strong"]]);
    if (answer === "yes") await doing(() => send("DELETE", `/admin/v1/limits/${quoted(limit.id)}`), "The limit is deleted.");
  }

  function limitForm() {
    const subject = el("input", { required: true, autocomplete: "off", placeholder: "tenant:acme", value: subjectId || "tenant:*", readonly: Boolean(subjectId) });
    const kind = el("select", {}, KINDS.map((name) => el("option", { value: name }, words(name))));
    const value = el("input", { type: "number", min: 0, step: "any", required: true });
    const model = el("input", { autocomplete: "off", placeholder: "all" });
    const form = el("form", { class: "row-form", "aria-label": "New limit" },
      field("Who", subject, subjectId ? "" : "tenant:id, key:id, *, tenant:* or key:*"), field("Kind", kind), field("Value", value), field("Model", model), el("button", { class: "strong" }, "Set limit"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const made = await doing(() => send("POST", "/admin/v1/limits", {
        subject: subject.value.trim(), kind: kind.value, value: Number(value.value), model: model.value.trim() || null,
      }), "The limit holds.");
      if (made) value.value = "";
    });
    return form;
  }

  limits.body.append(fault, said, limitForm(), list.node);
  return { node: limits.node, enter: () => doing(() => Promise.resolve(), "") };
}
