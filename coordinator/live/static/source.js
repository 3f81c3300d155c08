// Where traces come from: the coordinator's streams, and files. The token stays in this tab.

const KEY = "outrider-token";

export class NeedsToken extends Error {}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

export function keepToken(token) {
  sessionStorage.setItem(KEY, token);
}

async function ask(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  if (response.status === 401) throw new NeedsToken("this service asks for a token");
  if (!response.ok) throw new Error(await message(response));
  return response;
}

async function message(response) {
  const body = await response.text();
  try {
    return JSON.parse(body).error.message;
  } catch {
    return body || `${response.status} ${response.statusText}`;
  }
}

export async function sessions() {
  return (await (await ask("/live/api/sessions")).json()).sessions;
}

// One line a call of `take`, until the stream ends or `signal` aborts it.
export async function watch(sessionId, take, signal) {
  await readLines(await ask(`/live/api/sessions/${sessionId}/events`, { signal }), take);
}

export async function demo(options, take, signal) {
  const body = JSON.stringify(options);
  await readLines(await ask("/live/api/demo", { method: "POST", body, headers: { "content-type": "application/json" }, signal }), take);
}

async function readLines(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
    if (data.length) take(data);
  }
}

export async function readFile(file, take, most) {
  if (file.size > most) throw new Error(`${file.name} has ${file.size} bytes; this page reads ${most} at most`);
  take((await file.text()).split("\n"));
}

export function save(lines, name) {
  const url = URL.createObjectURL(new Blob([lines.join("\n"), "\n"], { type: "application/x-ndjson" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
