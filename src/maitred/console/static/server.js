// The server, as a page with a session sees it. The cookie goes along by itself and counts only beside the token, which
// this page alone is told; see docs/console.md.

const TOKEN_HEADER = "x-maitred-console";
let token = "";
let onLoggedOut = () => {};

/** A refusal, in the server's own words. */
export class Refusal extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message || `The server answered HTTP ${status}.`);
    this.status = status;
    this.code = error?.code || "";
    this.retryAfter = retryAfter;
  }
}

/** Called when a session has ended while it was used. */
export function whenLoggedOut(listener) {
  onLoggedOut = listener;
}

/** A request with the session. Returns the response if it is good.
 *  @throws {Refusal} The server refuses. @throws {TypeError} It cannot be reached. */
export async function request(method, path, { body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (token) all[TOKEN_HEADER] = token;
  if (body !== undefined) all["content-type"] = "application/json";
  const response = await fetch(path, {
    method, signal, headers: all, cache: "no-store", credentials: "same-origin",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.ok) return response;
  const error = await response.json().then((answer) => answer.error, () => null);
  const refusal = new Refusal(response.status, error, response.headers.get("retry-after"));
  if (response.status === 401 && token) {
    token = "";
    onLoggedOut();
  }
  throw refusal;
}

export const get = async (path) => (await request("GET", path)).json();
export const send = async (method, path, body) => (await request(method, path, { body })).json();

/** Calls `load` from `enter` to `leave`, every so often while somebody can see the page. `away` says what went wrong. */
export function poll(load, everyMs, away = null) {
  let timer = 0;
  let ended = false;
  async function enter() {
    // Where it fails, what is here stays.
    if (!document.hidden) await load().then(() => "", (error) => (error instanceof Refusal ? error.message : "The server does not answer. Trying again…"))
      .then((fault) => { if (away) away.textContent = fault; });
    if (!ended) timer = setTimeout(enter, everyMs);
  }
  function leave() {
    ended = true;
    clearTimeout(timer);
  }
  return { enter, leave };
}

/** Whether something of that path exists. @throws {Refusal} For another reason than that it does not. */
export const isThere = (path) => get(path).then(() => true, (error) => {
  if (error instanceof Refusal && error.status === 404) return false;
  throw error;
});

/** A page of a list, as [items, how to get those after it or null]. */
export async function pageOf(path, limit = 100, after = "") {
  const page = await get(`${path}${path.includes("?") ? "&" : "?"}limit=${limit}${after && `&after=${encodeURIComponent(after)}`}`);
  return [page.data, page.next ? () => pageOf(path, limit, page.next) : null];
}

/** Who is logged in; null where a key is asked for. */
export async function who() {
  const known = await get("/console/session");
  token = known?.token ?? "";
  return known;
}

/** Shows the key once. @throws {Refusal} It is not valid. */
export async function logIn(key) {
  token = "";
  const response = await request("POST", "/console/session", { headers: { authorization: `Bearer ${key}` } });
  const known = await response.json();
  token = known.token;
  return known;
}

export async function logOut() {
  await request("DELETE", "/console/session");
  token = "";
}

/** The events of a stream: {kind, data}. Ends when the stream does. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        let kind = "message";
        const data = [];
        for (const line of block.split(/\r?\n/)) {
          if (line.startsWith("event:")) kind = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        }
        if (data.length) yield { kind, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
