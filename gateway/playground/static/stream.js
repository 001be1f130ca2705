// What the page asks of the gateway: what is served, and the events of a generation.

// Why something did not work; `reason` is that of the gateway, or OFFLINE if it does not answer at all.
export class GatewayError extends Error {
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

export async function describeModel(key) {
  const response = await asked("model", { headers: headers(key) });
  return response.json();
}

// Yields the events of one generation. Aborting the signal ends it, at the gateway too.
export async function* generate(request, key, signal) {
  const response = await asked("generate", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(request),
    signal,
  });
  let pending = "";
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (pending + decoder.decode(value, { stream: true })).split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) yield JSON.parse(block.slice("data: ".length));
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function asked(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new GatewayError("OFFLINE", "The gateway does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const message = body.error?.message ?? `The gateway answered with status ${response.status}.`;
  return new GatewayError(response.status === 401 ? "UNAUTHENTICATED" : body.error?.code ?? String(response.status), message);
}
