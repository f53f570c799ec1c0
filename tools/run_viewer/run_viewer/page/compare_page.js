// Two runs side by side: where they part first, the settings that differ, every metric.

import { get, runPath } from "./api.js";
import { Charts, lines } from "./charts.js";
import { element, href, problemList, row, shown, table } from "./elements.js";

const text = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

export async function render(root, { a, b, clocks, all }) {
  if (!a || !b) return choose(root, a, b);
  const query = new URLSearchParams({ a, b });
  const found = await get("compare?" + query);
  const charts = new Charts();
  const withClocks = clocks === "1";
  const withAll = all === "1";
  const comparable = found.metrics.filter((metric) => withClocks || !metric.clock);
  const metrics = comparable.filter((metric) => withAll || differs(metric));
  const other = (change) => href(["compare"], { a, b, clocks: withClocks ? "1" : "", all: withAll ? "1" : "", ...change });
  root.append(
    element("h1", {}, `${a} and ${b}`),
    problemList(found.problems) ?? "",
    element("h2", {}, "the first difference"),
    firstDifference(found.first_difference, a, b),
    element("h2", {}, `${found.settings.length} settings that differ`),
    table(["setting", a, b], found.settings.map((setting) => row(setting.name, text(setting.a), text(setting.b))), { "aria-label": "settings" }),
    element("h2", {}, "curves"),
    await curves(charts, a, b),
    element("h2", {}, `metrics: ${comparable.filter(differs).length} of ${comparable.length} differ`),
    element("p", { class: "controls" },
      element("a", { href: other({ all: withAll ? "" : "1" }) }, withAll ? "only what differs" : "all metrics"),
      element("a", { href: other({ clocks: withClocks ? "" : "1" }) }, withClocks ? "without what the clock measures" : "also what the clock measures")),
    table(["metric", `${a}, last`, `${b}, last`, "apart from step", "largest distance", "at step"],
      metrics.map((metric) => row(metric.name, shown(metric.a), shown(metric.b), shown(metric.first_step_apart), shown(metric.largest_distance), shown(metric.largest_distance_step))), { "aria-label": "metrics" }),
  );
  return { ready: () => charts.ready(), leave: () => charts.leave() };
}

const differs = (metric) => metric.first_step_apart !== null || metric.a !== metric.b;

function firstDifference(first, a, b) {
  if (first === null) return element("p", {}, "All that both runs have stored is equal.");
  const parts = [element("p", {}, first.text)];
  if (first.group !== null) {
    const token = first.kind === "token" ? first.token : "";
    parts.push(element("p", { class: "controls" }, ...[a, b].map((run) => element("a", { href: href(["run", run, "step", first.step, first.group, first.index], { token }) }, `this response in ${run}`))));
  }
  return element("div", {}, ...parts);
}

async function curves(charts, a, b) {
  const area = element("div", { class: "charts" });
  const found = [];
  for (const name of [a, b]) {
    try {
      found.push({ name, ...(await get(runPath(name) + "/metrics")) });
    } catch (error) {
      area.append(problemList([`${name}: ${error.message}`]));
    }
  }
  for (const name of new Set(found.flatMap((one) => one.opening))) {
    const having = found.map((one, place) => ({ name: one.name, steps: one.steps, values: one.metrics[name], place })).filter((one) => one.values);
    const caption = found.map((one) => one.captions[name]).find(Boolean);
    area.append(charts.add(lines(having, 0), { showlegend: true }, [caption?.good ?? ""], name));
  }
  return area;
}

async function choose(root, a, b) {
  const { runs } = await get("runs");
  const menu = (label, value) => element("select", { "aria-label": label }, ...runs.map((run) => element("option", { value: run.name, selected: run.name === value }, run.name)));
  const first = menu("the one run", a);
  const second = menu("the other run", b);
  root.append(
    element("h1", {}, "compare two runs"),
    element("p", { class: "controls" }, first, second, element("button", { type: "button", onclick: () => (location.hash = href(["compare"], { a: first.value, b: second.value })) }, "compare")),
  );
}
