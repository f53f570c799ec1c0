// Where pages get their data: the server's JSON, or, in an exported file, the JSON that lies in it.

const stored = document.getElementById("exported");
/** @type {Object<string, any> | null} answers by path, in an exported file */
const answers = stored ? JSON.parse(stored.textContent) : null;

export const exported = answers !== null;

/**
 * @param {string} path below /api/, such as "runs/demo"
 * @returns {Promise<any>}
 * @throws {Error} with the server's words
 */
export async function get(path) {
  if (answers) {
    if (path in answers) return answers[path];
    const [base, query] = path.split("?");
    const words = new URLSearchParams(query);
    if (base.endsWith("/metrics") && base in answers) return chosenCurves(answers[base], words.get("names").split(","));
    if (base.endsWith("/search")) return search(base.replace(/\/search$/, "/"), words.get("text"));
    throw new Error("This file holds a part of the run only: it was exported without " + path);
  }
  const response = await fetch("api/" + path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || response.statusText);
  return body;
}

/** @param {string} name of a run: a path, one segment of a URL here; browsers take a "." out of a URL */
export const segment = (name) => (name === "." ? "~" : encodeURIComponent(name));
export const runPath = (name) => "runs/" + segment(name);

function chosenCurves(all, names) {
  return { ...all, metrics: Object.fromEntries(names.filter((name) => name in all.metrics).map((name) => [name, all.metrics[name]])) };
}

/** What the server's search does, over the responses that are in the file. */
function search(base, text) {
  const wanted = text.toLowerCase();
  const found = Object.entries(answers)
    .filter(([path, page]) => path.startsWith(base) && (page.prompt + page.texts.join("")).toLowerCase().includes(wanted))
    .map(([, page]) => [page.group_id, page.index]);
  return { found };
}
