// Where answers come from: the server of this page.

/** @param {string} what a name and a query @returns {Promise<Response>} */
export function ask(what) {
  return fetch(`api/v1/${what}`);
}

/** Where live messages go. @returns {WebSocket} */
export function connect() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  return new WebSocket(`${scheme}://${location.host}/api/v1/live`);
}

/** A search: signs of life, then the ranking. @param {string} query @param {AbortSignal} signal @param {(found: any) => void} told */
export async function search(query, signal, told) {
  const answer = await fetch(`api/v1/plan?${query}`, { signal });
  const reader = /** @type {ReadableStream<Uint8Array>} */ (answer.body).getReader(), decoder = new TextDecoder();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += decoder.decode(part.value, { stream: true });
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n")) {
      told(JSON.parse(text.slice(0, end)));
      text = text.slice(end + 1);
    }
  }
}
