// Where the seconds went: phases over all steps, and of one step its responses as bars with their tool calls.

import { get, runPath } from "./api.js";
import { Charts, colour, finite } from "./charts.js";
import { duration, element, href, problemList, row, shown, table } from "./elements.js";

const MOST_BARS = 256;

export async function render(root, parameters) {
  return parameters.step === undefined ? overSteps(root, parameters.run) : ofStep(root, parameters.run, Number(parameters.step));
}

async function overSteps(root, run) {
  const { steps, phases, problems } = await get(runPath(run) + "/time");
  const charts = new Charts();
  const parts = Object.entries(phases).filter(([name]) => name !== "step" && name !== "reward");
  const traces = parts.map(([name, values], place) => ({ x: steps, y: finite(values), name, type: "bar", marker: { color: colour(place) }, hovertemplate: "%{y:.4g} s" }));
  if (phases.step) traces.push({ x: steps, y: finite(phases.step), name: "step", type: "scatter", mode: "markers", marker: { color: "#888888", symbol: "line-ew-open" }, hovertemplate: "%{y:.4g} s" });
  root.append(
    element("h1", {}, "seconds by phase"),
    problemList(problems) ?? "",
    charts.add(traces, { own: true, barmode: "stack", showlegend: true, yaxis: { title: { text: "seconds" } } },
      ["A grey mark is the step up to the weight sync. Rewards are computed while responses are generated and are no part of the bar. Actor's and critic's updates run side by side."], "phases"),
    element("p", {}, "one step: ", ...steps.flatMap((step) => [element("a", { href: href(["run", run, "time", step]) }, String(step)), " "])),
  );
  return { ready: () => charts.ready(), leave: () => charts.leave() };
}

/** A response's length as the files have it: from its start to its end, or the sum of its parts. */
const lasted = (one) => (one.start !== null && one.end !== null ? one.end - one.start : one.generation === null ? null : one.generation + (one.tools ?? 0) + (one.waiting ?? 0));
/** Seconds of its tool calls, which every run has stored. */
const called = (one) => (one.calls.length ? one.calls.reduce((sum, call) => sum + call.seconds, 0) : null);

async function ofStep(root, run, step) {
  const found = await get(runPath(run) + "/time/" + step);
  const charts = new Charts();
  const timed = found.responses.filter((one) => one.start !== null && one.end !== null);
  const summed = found.responses.filter((one) => one.generation !== null);
  const known = timed.length ? timed : summed;
  const slowest = [...(known.length ? known : found.responses)].sort((a, b) => (lasted(b) ?? called(b) ?? 0) - (lasted(a) ?? called(a) ?? 0));
  const shownOnes = known.length ? slowest.slice(0, MOST_BARS) : [];
  const labels = shownOnes.map((one) => `${one.group}/${one.index}`);
  const bars = timed.length ? ganttTraces(shownOnes) : sumTraces(shownOnes, labels);
  const whole = found.phases.find((phase) => phase.name === "step");
  const phases = found.phases.map((phase) => row(phase.within ? "· " + phase.name : phase.name, shown(phase.seconds) + " s", whole && phase.within === "step" ? (100 * phase.seconds / whole.seconds).toFixed(1) + " %" : ""));
  root.append(
    element("h1", {}, `time of step ${step}`),
    problemList(found.problems) ?? "",
    table(["phase", "time", "of the step"], phases, { "aria-label": "phases" }),
    found.slowest_rank_ratio === null ? "" : element("p", {}, `slowest learner rank to the others' median: ${shown(found.slowest_rank_ratio)}`),
    ...found.lacks.map((text) => element("p", { class: "faint" }, text)),
  );
  if (found.spans.length) root.append(phaseBars(charts, found.spans));
  for (const [role, seconds] of Object.entries(found.ranks)) if (seconds.length) root.append(rankBars(charts, role, seconds));
  root.append(element("h2", {}, `${found.responses.length} responses, the slowest first`));
  if (shownOnes.length) {
    root.append(charts.add(bars, {
      own: true, barmode: timed.length ? "overlay" : "stack", showlegend: true, hovermode: "closest", height: Math.max(260, 90 + 16 * shownOnes.length),
      xaxis: { title: { text: timed.length ? "seconds since the first response began" : "seconds" } },
      yaxis: timed.length
        ? { autorange: "reversed", tickvals: shownOnes.map((_, place) => place), ticktext: labels, title: { text: "group/response" } }
        : { autorange: "reversed", type: "category", title: { text: "group/response" } },
    }, [slowest.length > MOST_BARS ? `The ${MOST_BARS} slowest of ${slowest.length}.` : "", timed.length ? "" : " Sums of each response: when they began was not stored."], "responses"));
    if (timed.length) root.append(byEngine(charts, timed));
  }
  root.append(table(["response", "lasted", "generation", "tools", "waiting", "seconds in calls", "sampled tokens", "calls", "engine"],
    slowest.slice(0, 20).map((one) => row(
      element("a", { href: href(["run", run, "step", step, one.group, one.index]) }, `${one.group}/${one.index}`),
      duration(lasted(one)), duration(one.generation), duration(one.tools), duration(one.waiting), duration(called(one)), shown(one.sampled), shown(one.calls.length), shown(one.engine))),
    { "aria-label": "slowest responses" }));
  return { ready: () => charts.ready(), leave: () => charts.leave() };
}

function bar(name, hue, spans, width) {
  return { type: "bar", orientation: "h", name, marker: { color: hue }, width, x: spans.map((one) => one.seconds), base: spans.map((one) => one.start), y: spans.map((one) => one.row), text: spans.map((one) => one.text), textposition: "none", hovertemplate: "%{text}" };
}

/** When each phase ran. */
function phaseBars(charts, spans) {
  const names = [...new Set([...spans].sort((a, b) => a.start - b.start).map((one) => one.name))];
  const rows = spans.map((one) => ({ ...one, row: names.indexOf(one.name), text: `${one.name}: ${duration(one.seconds)}, from ${duration(one.start)}` }));
  return charts.add([bar("phases", colour(0), rows, 0.7)], {
    own: true, hovermode: "closest", height: 110 + 24 * names.length, xaxis: { title: { text: "seconds since the step began" } },
    yaxis: { autorange: "reversed", tickvals: names.map((_, place) => place), ticktext: names },
  }, ["A phase within another, such as gen in step, has a bar of its own."], "phases of the step");
}

/** One bar a rank: one that is longer than the others is the slow one. */
function rankBars(charts, role, seconds) {
  const rows = seconds.map((own, rank) => ({ row: rank, start: 0, seconds: own, text: `rank ${rank}: ${duration(own)}` }));
  return charts.add([bar("ranks", colour(2), rows, 0.7)], {
    own: true, hovermode: "closest", height: 110 + 22 * rows.length, xaxis: { title: { text: "seconds in its own part of the updates" } },
    yaxis: { autorange: "reversed", tickvals: rows.map((one) => one.row), ticktext: rows.map((one) => "rank " + one.row) },
  }, ["Waiting for other data-parallel ranks is left out."], `ranks of the ${role}`);
}

function ganttTraces(responses) {
  const whole = responses.map((one, place) => ({ row: place, start: one.start, seconds: one.end - one.start, text: `${one.group}/${one.index}: ${duration(one.end - one.start)}, of it waiting ${duration(one.waiting)}, ${shown(one.sampled)} sampled tokens, engine ${shown(one.engine)}` }));
  const calls = responses.flatMap((one, place) => one.calls.filter((call) => call.start !== null).map((call) => ({ row: place, start: call.start, seconds: call.seconds, text: `${call.name} ${call.status}: ${duration(call.seconds)}`, ok: call.status === "ok" })));
  return [
    bar("generation and waiting", colour(0), whole, 0.8),
    bar("tool call", colour(4), calls.filter((call) => call.ok), 0.5),
    bar("tool call that failed", colour(1), calls.filter((call) => !call.ok), 0.5),
  ];
}

function sumTraces(responses, labels) {
  return ["generation", "tools", "waiting"].map((part, place) => ({ type: "bar", orientation: "h", name: part, y: labels, x: responses.map((one) => one[part]), marker: { color: colour([0, 4, 3][place]) }, hovertemplate: "%{x:.4g} s" }));
}

/** Responses in a row for each engine: one that continues when the others have nothing left is the straggler. */
function byEngine(charts, responses) {
  const engines = [...new Set(responses.map((one) => one.engine))].sort();
  const spans = responses.map((one) => ({ row: engines.indexOf(one.engine), start: one.start, seconds: one.end - one.start, text: `${one.group}/${one.index}: ${duration(one.end - one.start)}` }));
  const trace = { ...bar("responses", colour(0), spans, 0.7), opacity: 0.25 };
  const last = engines.map((engine) => Math.max(...responses.filter((one) => one.engine === engine).map((one) => one.end)));
  const ends = { type: "scatter", mode: "markers", name: "last answer", x: last, y: engines.map((_, place) => place), marker: { color: colour(1), symbol: "line-ns-open", size: 16 }, hovertemplate: "last answer after %{x:.4g} s" };
  return charts.add([trace, ends], {
    own: true, barmode: "overlay", hovermode: "closest", height: 120 + 34 * engines.length, xaxis: { title: { text: "seconds since the first response began" } },
    yaxis: { tickvals: engines.map((_, place) => place), ticktext: engines.map((engine) => (engine === null ? "not stored" : "engine " + engine)) },
  }, ["A response stands at the engine that answered last."], "engines");
}
