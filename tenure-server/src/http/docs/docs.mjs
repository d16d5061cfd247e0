// Sends the requests of the forms in /docs and shows the responses. The key is read from its field for each request;
// it is stored nowhere. Responses are only ever inserted as text.

const MAX_SHOWN = 1_000_000;
const SHOWN_HEADERS = ["x-request-id", "x-session-id", "x-run-id", "x-tenure-warning", "etag", "retry-after"];

/** The URL and the options of `fetch` for a form. */
export function requestOf(form, key, user) {
  let path = form.dataset.path;
  const query = new URLSearchParams();
  const headers = {};
  for (const field of form.querySelectorAll("[data-in]")) {
    const value = field.value.trim();
    if (field.dataset.in === "path") {
      path = path.replace(`{${field.name}}`, encodeURIComponent(value));
    } else if (value !== "" && field.dataset.in === "query") {
      query.append(field.name, value);
    } else if (value !== "" && field.dataset.in === "header") {
      headers[field.name] = value;
    }
  }
  if (key) headers.Authorization = `Bearer ${key}`;
  if (user && !headers["X-Tenure-User"]) headers["X-Tenure-User"] = user;
  const options = {method: form.dataset.method, headers};
  const body = form.querySelector("textarea");
  if (body && body.value.trim() !== "") {
    headers["Content-Type"] = "application/json";
    options.body = body.value;
  }
  const text = query.toString();
  return {url: text ? `${path}?${text}` : path, options};
}

function element(name, className, text) {
  const created = document.createElement(name);
  created.className = className;
  created.textContent = text;
  return created;
}

/** The text of a body: JSON is indented, everything else is shown as it arrived. */
function pretty(text, type) {
  if (!type.includes("json") || type.includes("jsonl")) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Reads a body and shows it while it arrives. */
async function show(response, output) {
  const body = element("span", "body", "");
  output.append("\n", body);
  const decoder = new TextDecoder();
  let text = "";
  for (const reader = response.body?.getReader(); reader;) {
    const {done, value} = await reader.read();
    if (done) break;
    text += decoder.decode(value, {stream: true});
    if (text.length > MAX_SHOWN) {
      await reader.cancel();
      body.textContent = `${text.slice(0, MAX_SHOWN)}\n… the rest is not shown`;
      return;
    }
    body.textContent = text;
  }
  body.textContent = pretty(text, response.headers.get("content-type") ?? "");
}

async function send(form) {
  const output = form.querySelector(".result");
  const [submit, stop] = form.querySelectorAll("button");
  const controller = new AbortController();
  stop.onclick = () => controller.abort();
  output.hidden = false;
  output.replaceChildren("…");
  submit.disabled = true;
  stop.disabled = false;
  const started = performance.now();
  try {
    const {url, options} = requestOf(form, document.querySelector("#key").value, document.querySelector("#user").value);
    const response = await fetch(url, {...options, signal: controller.signal});
    const time = `${Math.round(performance.now() - started)} ms`;
    const status = `${response.status} ${response.statusText}`.trim();
    output.replaceChildren(element("span", response.ok ? "status done" : "status failed", status), `  ${time}\n`);
    for (const name of SHOWN_HEADERS.filter((name) => response.headers.has(name))) {
      output.append(`${name}: ${response.headers.get(name)}\n`);
    }
    await show(response, output);
  } catch (error) {
    output.append(element("span", "status failed", `\n${controller.signal.aborted ? "stopped" : error}`));
  } finally {
    submit.disabled = false;
    stop.disabled = true;
  }
}

/** Opens the operation that the address names. */
function openNamed() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named?.tagName === "DETAILS") named.open = true;
}

for (const form of document.querySelectorAll("form")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
}
addEventListener("hashchange", openNamed);
openNamed();
