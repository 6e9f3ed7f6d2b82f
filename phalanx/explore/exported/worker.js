// Python in a worker: the same package as behind the server, over messages.

import { loadPyodide } from "../pyodide/pyodide.mjs";

const QUIET = 30; // milliseconds without a message, after which slow panels have their turn
const here = (/** @type {string} */ name) => new URL(`../${name}`, import.meta.url).href;
let resting = 0;

async function start() {
  const python = await loadPyodide({ indexURL: here("pyodide/") });
  await python.loadPackage("numpy", { messageCallback: () => {} });
  const code = await (await fetch(here("phalanx.zip"))).arrayBuffer();
  python.unpackArchive(code, "zip", { extractDir: "/phalanx-code" });
  python.runPython("import sys; sys.path.insert(0, '/phalanx-code')");
  return python.pyimport("phalanx.explore.local");
}

const started = start();
started.then(() => postMessage({ ready: true }), (error) => postMessage({ failed: String(error.message || error).trim().split("\n").pop() }));

onmessage = async (/** @type {MessageEvent} */ { data }) => {
  const local = await started;
  if (data.live !== undefined) {
    clearTimeout(resting);
    postMessage({ live: local.live(data.live) });
    resting = setTimeout(() => {
      const slow = local.slow();
      if (slow) postMessage({ live: slow });
    }, QUIET);
    return;
  }
  const answer = local.asked(data.ask), [status, body] = answer.toJs();
  answer.destroy();
  postMessage({ id: data.id, status, body });
};
