// The way to the server: the link's code for a token, and the stream of facts.
//
// The token is kept for this tab only. Scripts send it in a header, so that no other page's request
// carries it, as a cookie would.

const KEY = "zmqdist-token";
const AGAIN_MS = 2_000;

export class Refused extends Error {}

let token = "";

/** Take the code out of the address, and exchange it. Throws Refused with a sentence. */
export async function open() {
  const match = /^#code=([\w-]+)$/.exec(location.hash);
  if (match) {
    history.replaceState(null, "", "/#/overview");
    const response = await fetch("/api/session", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ code: match[1] }),
      referrerPolicy: "no-referrer",
    });
    const answer = await response.json();
    if (!response.ok) throw new Refused(answer.problem);
    token = answer.token;
    sessionStorage.setItem(KEY, token);
  }
  token ||= sessionStorage.getItem(KEY) ?? "";
  if (!token) throw new Refused("Open the link that zmqdist has printed: it lets this page read.");
}

async function request(path, signal) {
  const response = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, signal });
  if (response.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new Refused((await response.json()).problem);
  }
  return response;
}

/** Ask for the logs or stacks of a worker. */
export async function ask(method, parameters) {
  const response = await request(`/api/ask/${method}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (answer.problem) throw new Error(answer.problem);
  return answer.answer;
}

/** Call `take` with each message of the server, until the server refuses this page. */
export async function follow(take, lost) {
  for (;;) {
    try {
      await readLines(await request("/api/facts"), take);
      lost("The dashboard's server has ended.");
    } catch (error) {
      if (error instanceof Refused) throw error;
      lost("The dashboard's server does not answer.");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function readLines(response, take) {
  if (!response.ok) throw new Error(String(response.status));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = value.split("\n");
    pieces.push(lines[0]);
    for (const line of lines.slice(1)) {
      take(JSON.parse(pieces.join("")));
      pieces = [line];
    }
  }
}
