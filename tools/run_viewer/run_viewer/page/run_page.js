// One run: state, curves of any metrics, other runs laid over them, settings, environment, files.

import { exported, get, runPath, segment } from "./api.js";
import { rename } from "./app.js";
import { Charts, colour, lines } from "./charts.js";
import { duration, element, href, problemList, row, shown, table } from "./elements.js";

const words = (text) => (text ? text.split(",").filter(Boolean) : []);
const fileLink = (run, path) => "files/" + segment(run) + "/" + path.split("/").map(encodeURIComponent).join("/");
const setting = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

export async function render(root, parameters) {
  const run = await get(runPath(parameters.run));
  const chosen = { names: words(parameters.names), others: words(parameters.with), weight: Number(parameters.smooth) || 0, log: parameters.log === "1" };
  const charts = new Charts();
  const area = element("div", { class: "charts" });
  const legend = element("p", { class: "controls", "aria-label": "runs" });
  const trouble = element("div", {});

  const answers = new Map(); // Smoothing asks for nothing again.
  let drawing = 0;

  async function metricsOf(name) {
    // An exported file has all metrics in one answer.
    const path = runPath(name) + "/metrics" + (chosen.names.length && !exported ? "?names=" + chosen.names.map(encodeURIComponent).join(",") : "");
    if (!answers.has(path)) answers.set(path, await get(path));
    return answers.get(path);
  }

  async function draw() {
    const mine = ++drawing;
    rename(["run", parameters.run], { names: chosen.names.join(","), with: chosen.others.join(","), smooth: chosen.weight || "", log: chosen.log ? "1" : "" });
    const found = [];
    const failed = [];
    for (const name of [parameters.run, ...chosen.others]) {
      try {
        found.push({ name, ...(await metricsOf(name)) });
      } catch (error) {
        failed.push(`${name}: ${error.message}`);
      }
    }
    if (mine !== drawing) return;
    charts.leave();
    area.replaceChildren();
    legend.replaceChildren(...(found.length > 1 ? found.map(({ name }, place) => element("span", {}, element("b", { style: `color: ${colour(place)}` }, "━ "), name)) : []));
    const names = chosen.names.length ? chosen.names : [...new Set(found.flatMap((one) => one.opening))];
    for (const name of names) {
      const having = found.map((one, place) => ({ name: one.name, steps: one.steps, values: one.metrics[name], place })).filter((one) => one.values);
      if (!having.length) continue;
      const caption = found.map((one) => one.captions[name]).find(Boolean);
      const text = caption
        ? [caption.good ? element("b", {}, caption.good) : "", caption.good ? element("br") : "", caption.meaning, caption.unit ? ` (${caption.unit})` : ""]
        : ["not in docs/metrics.md"];
      area.append(charts.add(lines(having, chosen.weight), { yaxis: { type: chosen.log ? "log" : "linear" } }, text, name));
    }
    every.replaceChildren(...[...new Set(found.flatMap((one) => one.names))].sort().map((name) => element("option", { value: name })));
    shownNames = names;
    const problems = found.flatMap((one) => (one.problems || []).map((line) => `${one.name}: ${line}`));
    trouble.replaceChildren(problemList([...new Set([...failed, ...problems])]) ?? "");
    if (area.isConnected) charts.ready();
  }

  let shownNames = [];
  const every = element("datalist", { id: "metric-names" });
  const add = element("input", {
    list: "metric-names", placeholder: "add a metric", "aria-label": "add a metric", size: "32",
    onchange: (event) => {
      const name = event.target.value.trim();
      event.target.value = "";
      if (name) {
        chosen.names = [name, ...shownNames.filter((other) => other !== name)];
        draw();
      }
    },
  });
  const remove = element("button", { type: "button", onclick: () => { chosen.names = []; draw(); } }, "first ones again");
  const smooth = element("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(chosen.weight), "aria-label": "smoothing", oninput: (event) => { chosen.weight = Number(event.target.value); draw(); } });
  const log = element("input", { type: "checkbox", checked: chosen.log, onchange: (event) => { chosen.log = event.target.checked; draw(); } });
  const others = element("select", { "aria-label": "lay another run over", onchange: (event) => { if (event.target.value) { chosen.others.push(event.target.value); draw(); } event.target.value = ""; } });
  try {
    const { runs } = await get("runs");
    others.append(element("option", { value: "" }, "lay a run over …"), ...runs.filter((one) => one.name !== parameters.run).map((one) => element("option", { value: one.name }, one.name)));
  } catch {
    others.hidden = true; // An exported file has one run.
  }
  const figures = Object.entries(run.figures).map(([name, value]) => row(name, value.last, value.best, value.best_step));
  const environment = Object.entries(run.environment).map(([name, value]) => row(name, typeof value === "object" && value !== null && !Array.isArray(value) ? Object.entries(value).map(([key, one]) => `${key} ${one}`).join(", ") : setting(value)));
  root.append(
    element("h1", {}, `${run.title}: ${run.status}`),
    element("p", {}, `step ${shown(run.step)} of ${shown(run.total_steps)}, ${duration(run.seconds)} in steps, validations and checkpoints. ${run.reason}.`),
    problemList(run.problems) ?? "",
    element("p", { class: "controls" },
      run.steps.length ? element("a", { href: href(["run", parameters.run, "step", run.steps[run.steps.length - 1]]) }, "responses") : "no responses stored",
      element("a", { href: href(["run", parameters.run, "time"]) }, "time")),
    figures.length ? table(["figure", "last", "best", "at step"], figures, { "aria-label": "figures" }) : "",
    element("h2", {}, "curves"),
    element("div", { class: "controls" }, add, every, remove, element("label", {}, "smoothing ", smooth), element("label", {}, log, " logarithmic"), others),
    legend, trouble, area,
    element("details", {}, element("summary", {}, `${Object.keys(run.settings).length} settings`), table(["setting", "value"], Object.entries(run.settings).map(([name, value]) => row(name, setting(value))), { "aria-label": "settings" })),
    element("details", {}, element("summary", {}, "commit, versions, hardware"), ...run.lacks.map((text) => element("p", { class: "faint" }, text)), table(["", ""], environment, { "aria-label": "environment" })),
    element("details", {}, element("summary", {}, "seconds by stage"), table(["stage", "seconds"], Object.entries(run.stages).map(([name, value]) => row(name, value)), { "aria-label": "stages" })),
    element("details", { open: true }, element("summary", {}, "steps"), element("p", {}, ...run.steps.flatMap((step) => [element("a", { href: href(["run", parameters.run, "step", step]) }, String(step)), " "]))),
    exported ? "" : element("details", { open: true }, element("summary", {}, "files"), element("ul", {}, ...run.links.map(({ text, href: path }) => element("li", {}, element("a", { href: fileLink(parameters.run, path) }, text))))),
  );
  await draw();
  const state = (found) => `${found.status} ${found.step} ${found.steps.length}`;
  const now = exported ? undefined : async () => state(await get(runPath(parameters.run)));
  return { ready: () => charts.ready(), leave: () => charts.leave(), state: state(run), now };
}
