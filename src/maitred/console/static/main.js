// The frame around the pages: who is logged in, which page is shown, and whether the server answers.

import { el, field } from "./dom.js";
import { livePage } from "./live.js";
import { playgroundPage } from "./playground.js";
import { answersPage } from "./answers.js";
import { feedbackPage } from "./feedback.js";
import { keysPage } from "./keys.js";
import { modelsPage } from "./models.js";
import { requestsPage } from "./requests.js";
import { rolloutsPage } from "./rollouts.js";
import { scalingPage } from "./scaling.js";
import { tenantsPage } from "./tenants.js";
import { usagePage } from "./usage.js";
import { usePage } from "./use.js";
import { logIn, logOut, whenLoggedOut, who } from "./server.js";
import { themeSwitch } from "./theme.js";

const admin = (me) => me.scopes.includes("admin");
const inference = (me) => me.scopes.includes("inference");
const PAGES = {
  live: { title: "Live", page: livePage, open: (me) => admin(me) || me.scopes.includes("metrics") },
  playground: { title: "Playground", page: playgroundPage, open: inference },
  use: { title: "My use", page: usePage, open: inference },
  tenants: { title: "Tenants", page: tenantsPage, open: admin },
  keys: { title: "Keys and limits", page: keysPage, open: admin },
  usage: { title: "Usage", page: usagePage, open: admin },
  models: { title: "Models", page: modelsPage, open: admin },
  rollouts: { title: "Rollouts", page: rolloutsPage, open: admin },
  scaling: { title: "Scaling", page: scalingPage, open: admin },
  requests: { title: "Requests", page: requestsPage, open: admin },
  feedback: { title: "Feedback", page: feedbackPage, open: admin },
  cache: { title: "Cache", page: answersPage, open: admin },
};
const LINKS = { ok: "Live", wait: "Connecting…", lost: "Reconnecting…", none: "" };

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const link = document.getElementById("link");
const account = document.getElementById("who");
let me = null;
let leave = () => {};

/** Says how the connection is. */
function connection(state) {
  link.className = `pill ${state}`;
  link.textContent = LINKS[state];
}

/** The page that the address names, and what of it: `#tenants/acme` is the page `tenants` about `acme`. */
function wantedPage() {
  const [name, ...about] = location.hash.slice(1).split("/");
  try { return [name, decodeURIComponent(about.join("/"))]; } catch { return [name, ""]; }
}

function show() {
  leave();
  leave = () => {};
  connection("none");
  const open = Object.entries(PAGES).filter(([, { open }]) => open(me));
  const [wanted, about] = wantedPage();
  const name = open.some(([name]) => name === wanted) ? wanted : open[0]?.[0];
  nav.hidden = false;
  nav.replaceChildren(...open.map(([each, { title }]) => el("a", { href: `#${each}`, "aria-current": each === name && "page" }, title)));
  account.hidden = false;
  account.replaceChildren(...(me.anonymous ? ["Log in"] : ["Log out", el("span", { class: "of" }, ` ${me.tenant}`)]));
  if (!name) {
    main.replaceChildren(el("p", { class: "empty" }, "This key may do nothing here. Ask for one with the scope inference, metrics or admin."));
    return;
  }
  nav.querySelector("[aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
  document.title = `${PAGES[name].title} · maitred`;
  const page = PAGES[name].page(me, connection, about);
  main.replaceChildren(el("h1", { class: "unseen" }, PAGES[name].title), page.node);
  leave = page.leave ?? leave;
  main.setAttribute("aria-busy", "true");
  Promise.resolve(page.enter?.()).finally(() => { if (page.node.isConnected) main.removeAttribute("aria-busy"); });
}

function login(message = "") {
  main.removeAttribute("aria-busy");
  leave();
  leave = () => {};
  connection("none");
  nav.hidden = true;
  document.title = "Log in · maitred";
  const key = el("input", { type: "password", name: "key", autocomplete: "current-password", required: true, spellcheck: "false", placeholder: "sk-mtd-…" });
  const fault = el("p", { class: "fault", role: "alert" }, message);
  const form = el("form", { class: "login panel" },
    el("h1", {}, "Log in"),
    el("p", { class: "note" }, "With an API key. It is sent once; the browser keeps a session that ends by itself, never the key."),
    field("API key", key), fault,
    el("div", { class: "actions" },
      me?.anonymous && el("button", { type: "button", class: "quiet", onclick: show }, "Back"),
      el("button", { class: "strong" }, "Log in")),
    el("p", { class: "hint" }, "The first start of maitred serve prints an admin key. Who has none asks an administrator."));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    fault.textContent = "";
    try {
      me = await logIn(key.value.trim());
      show();
      main.focus({ preventScroll: true });
    } catch (error) {
      fault.textContent = error.message;
      key.select();
    }
  });
  main.replaceChildren(form);
  account.hidden = true;
  key.focus();
}

async function start() {
  try {
    me = await who();
    me ? show() : login();
  } catch (error) {
    connection("lost");
    main.replaceChildren(el("p", { class: "empty" }, "The server does not answer. Trying again…"));
    setTimeout(start, 2000);
  }
}

themeSwitch(document.getElementById("theme"));
whenLoggedOut(() => { me = null; login("Your session has ended. Log in again."); });
account.addEventListener("click", async () => {
  if (me.anonymous) return login();
  await logOut().catch(() => {});
  await start();
});
addEventListener("hashchange", () => { if (me && wantedPage()[0] in PAGES) { show(); scrollTo(0, 0); main.focus({ preventScroll: true }); } });
start();
