// Tenants, keys and limits, through the administration's API like everybody else.

import { ask, attempt, el, field, panel, row, table } from "./dom.js";
import { amount, date, words } from "./format.js";
import { everything, send } from "./server.js";

const KEYS = [["Name"], ["Key"], ["Tenant"], ["Scopes"], ["State"], ["Expires"], [""]];
const LIMITS = [["Who"], ["Kind"], ["Model"], ["Value", true], [""]];
const KINDS = ["requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute", "concurrent_requests",
  "concurrent_tokens", "context_tokens", "output_tokens", "usd_per_day", "usd_per_week", "usd_per_month", "usd_total"];
const SCOPES = ["inference", "metrics", "admin"];
const DAY_MS = 86_400_000;

const stateOf = (key) => (key.revoked ? "revoked" : key.expires_at && new Date(key.expires_at) < Date.now() ? "expired" : "active");

export function keysPage(me) {
  const fault = el("p", { class: "fault", role: "alert" });
  const said = el("p", { class: "unseen", role: "status" });
  const tenantNames = el("datalist", { id: "tenant-names" });
  const keys = panel("Keys", { wide: true });
  const limits = panel("Limits", { wide: true });
  const lists = { keys: table("Keys", KEYS), limits: table("Limits", LIMITS) };
  const node = el("div", { class: "grid single" }, fault, said, tenantNames, keys.node, limits.node);

  /** Does something, shows what went wrong, and looks at everything again. */
  const doing = (work, done) => attempt(fault, async () => {
    const made = await work();
    said.textContent = done;
    await load();
    return made;
  });

  async function load() {
    const [allKeys, allLimits, tenants] = await Promise.all([everything("/admin/v1/keys"), everything("/admin/v1/limits"), everything("/admin/v1/tenants")]);
    tenantNames.replaceChildren(...tenants.map((tenant) => el("option", { value: tenant.id }, tenant.name)));
    keys.hint.textContent = `${allKeys.filter((key) => stateOf(key) === "active").length} active`;
    lists.keys.rows.replaceChildren(...allKeys.map(keyRow));
    lists.limits.rows.replaceChildren(...(allLimits.length ? allLimits.map(limitRow)
      : [el("tr", {}, el("td", { colspan: LIMITS.length, class: "empty" }, "Nothing is limited."))]));
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
    if (answer === "yes") await doing(() => send("POST", `/admin/v1/keys/${encodeURIComponent(key.id)}/revoke`), "The key is revoked.");
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
    await doing(() => send("PUT", `/admin/v1/limits/${encodeURIComponent(limit.id)}`, { subject, kind, model, burst, hard, value: Number(value.value) }), "The limit is changed.");
  }

  async function remove(limit) {
    const answer = await ask("Delete this limit?", el("p", {}, `${words(limit.kind)} of ${limit.subject}. It stops holding at once.`), [["Keep it", ""], ["Delete", "yes", "danger strong"]]);
    if (answer === "yes") await doing(() => send("DELETE", `/admin/v1/limits/${encodeURIComponent(limit.id)}`), "The limit is deleted.");
  }

  function keyForm() {
    const tenant = el("input", { list: "tenant-names", required: true, autocomplete: "off", pattern: "[a-z0-9][a-z0-9_\\-]*", value: me.tenant });
    const name = el("input", { maxlength: 200, autocomplete: "off" });
    const expires = el("input", { type: "number", min: 1, max: 3650, step: 1, placeholder: "never" });
    const scopes = SCOPES.map((scope) => [scope, el("input", { type: "checkbox", id: `scope-${scope}`, checked: scope === "inference" })]);
    const form = el("form", { class: "row-form", "aria-label": "New key" },
      field("Tenant", tenant, "made if it does not exist"), field("Name", name), field("Expires in days", expires),
      el("fieldset", {}, el("legend", {}, "Scopes"), scopes.map(([scope, box]) => el("span", { class: "check" }, box, el("label", { for: box.id }, scope)))),
      el("button", { class: "strong" }, "Create key"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const body = {
        tenant: tenant.value.trim(), name: name.value.trim(), scopes: scopes.filter(([, box]) => box.checked).map(([scope]) => scope),
        expires_at: expires.value ? new Date(Date.now() + Number(expires.value) * DAY_MS).toISOString() : null,
      };
      const made = await doing(async () => {
        const known = [...tenantNames.options].some((option) => option.value === body.tenant);
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

  function limitForm() {
    const subject = el("input", { required: true, autocomplete: "off", placeholder: "tenant:acme", value: "tenant:*" });
    const kind = el("select", {}, KINDS.map((name) => el("option", { value: name }, words(name))));
    const value = el("input", { type: "number", min: 0, step: "any", required: true });
    const model = el("input", { autocomplete: "off", placeholder: "all" });
    const form = el("form", { class: "row-form", "aria-label": "New limit" },
      field("Who", subject, "tenant:id, key:id, *, tenant:* or key:*"), field("Kind", kind), field("Value", value), field("Model", model), el("button", { class: "strong" }, "Set limit"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const made = await doing(() => send("POST", "/admin/v1/limits", {
        subject: subject.value.trim(), kind: kind.value, value: Number(value.value), model: model.value.trim() || null,
      }), "The limit holds.");
      if (made) value.value = "";
    });
    return form;
  }

  keys.body.append(keyForm(), lists.keys.node);
  limits.body.append(limitForm(), lists.limits.node);
  return { node, enter: () => doing(() => Promise.resolve(), "") };
}
