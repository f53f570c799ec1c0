// All runs: state, figures, the settings in which they differ; some of them chosen for curves or for a comparison.

import { get } from "./api.js";
import { duration, element, href, problemList, row, shown, table } from "./elements.js";

const GOOD = { finished: "good", died: "bad" };

export async function render(root) {
  const { runs, differing } = await get("runs");
  if (runs.length === 1 && runs[0].name === ".") return location.replace(href(["run", "."]));  // nothing to choose from
  const figures = [...new Set(runs.flatMap((run) => Object.keys(run.figures)))].filter((name) => /mean|rate/.test(name) && !name.includes("best@") && !name.includes("maj@"));
  const chosen = new Set();
  const curves = element("a", { href: href([]) }, "");
  const compare = element("a", { href: href([]) }, "");

  function choose(name, checked) {
    chosen[checked ? "add" : "delete"](name);
    const [first, ...others] = chosen;
    curves.textContent = chosen.size > 1 ? `curves of the ${chosen.size} chosen runs` : "";
    if (first) curves.href = href(["run", first], { with: others.join(",") });
    compare.textContent = chosen.size === 2 ? "compare the two" : "";
    if (others.length) compare.href = href(["compare"], { a: first, b: others[0] });
  }

  const rows = runs.map((run) => row(
    element("input", { type: "checkbox", "aria-label": "choose " + run.title, onchange: (event) => choose(run.name, event.target.checked) }),
    element("a", { href: href(["run", run.name]) }, run.name === "." ? run.title : run.name),
    element("span", { class: GOOD[run.status] ?? "", title: run.reason }, run.status + (run.status === "died" ? ` after step ${shown(run.step)}` : "")),
    `${shown(run.step)} of ${shown(run.total_steps)}`,
    ...figures.map((name) => {
      const found = run.figures[name];
      return found ? `${shown(found.last)} (best ${shown(found.best)} at step ${shown(found.best_step)})` : "–";
    }),
    ...differing.map((name) => {
      const value = run.settings[name];
      return typeof value === "object" && value !== null ? JSON.stringify(value).slice(0, 80) : shown(typeof value === "boolean" ? String(value) : value);
    }),
    duration(run.seconds),
    run.started ? new Date(run.started * 1000).toLocaleString() : "–",
  ));
  // What a person compares stands first, by short names: beside full ones the last columns lay beyond a screen's edge.
  const headings = [...figures.map((name) => brief(name, "/", figures)), ...differing.map((name) => brief(name, ".", differing))];
  root.append(
    element("h1", {}, `${runs.length} ${runs.length === 1 ? "run" : "runs"}`),
    problemList(runs.flatMap((run) => run.problems.map((text) => `${run.title}: ${text}`))) ?? "",
    element("p", { class: "controls", role: "status" }, curves, compare),
    table(["", "run", "state", "step", ...headings, "in steps", "started"], rows, { "aria-label": "runs" }),
  );
  const state = (found) => found.map((run) => `${run.name} ${run.status} ${run.step}`).join();
  // What is chosen for a comparison stays.
  const now = async () => (chosen.size ? state(runs) : state((await get("runs")).runs));
  return { state: state(runs), now };
}

/** The end of a name that tells it from the others, with the whole one on hover. */
function brief(name, separator, all) {
  const parts = name.split(separator);
  let count = separator === "/" ? 2 : 1; // mean@4 alone says nothing
  const end = (one) => one.split(separator).slice(-count).join(separator);
  while (count < parts.length && all.filter((one) => end(one) === end(name)).length > 1) count += 1;
  return element("span", { title: name }, end(name));
}
