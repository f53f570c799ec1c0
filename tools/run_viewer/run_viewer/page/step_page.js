// A step: its groups with each response's reward as a strip, filters, search, and the question and verdict of a group.
// Only the lines in sight are in the document, so a step of thousands of groups scrolls like one of ten.

import { get, runPath } from "./api.js";
import { rename } from "./app.js";
import { element, href, problemList, row, shown, table } from "./elements.js";

const LINE = 74; // px; the height of .group in style.css
const MARGIN = 5; // lines kept above and below what is in sight

/** Conditions on a response, by the parameter of the address that asks for them. */
const conditions = {
  verdict: (response, wanted) => ({ right: right(response), wrong: !right(response) })[wanted],
  reward: (response, wanted) => magnitude(response.reward) >= Number(wanted),
  accuracy: (response, wanted) => magnitude(response.accuracy) >= Number(wanted),
  tools: (response, wanted) => (wanted === "none" ? !response.calls : response.tool_statuses.includes(wanted)),
  end: (response, wanted) => response.finish_reason === wanted,
  masked: (response, wanted) => (wanted === "some" ? response.masked_share > 0 : response.masked_share === 0),
  difference: (response, wanted) => magnitude(response.largest_difference) > Number(wanted),
};

/** Right by the grader where it says so, else by the reward's sign. */
const right = (response) => (response.accuracy !== null ? response.accuracy > 0 : response.reward > 0);
const magnitude = (value) => (value === "Infinity" ? Infinity : value === null || value === "-Infinity" ? -Infinity : value);

export async function render(root, parameters) {
  const { run, step } = parameters;
  const base = `${runPath(run)}/steps/${step}`;
  const [page, about] = await Promise.all([get(base), get(runPath(run))]);
  const filters = Object.fromEntries(["verdict", "reward", "accuracy", "tools", "end", "masked", "difference", "kept", "text"].map((name) => [name, parameters[name] || ""]));
  let found = null; // what a search for text has found, as "group/index"
  let lines = [];
  let chosen = 0;

  const list = element("div", { class: "groups", tabindex: "0", role: "listbox", "aria-label": "groups" });
  const space = element("div");
  list.append(space);
  const detail = element("section", { "aria-live": "polite", id: "group-detail" });
  const count = element("span", { class: "faint", id: "count", role: "status" });

  const matches = (group, response) =>
    Object.entries(conditions).every(([name, test]) => !filters[name] || test(response, filters[name])) &&
    (!found || found.has(`${group.group_id}/${response.index}`));

  function filter() {
    lines = page.groups
      .filter((group) => !filters.kept || (filters.kept === "kept") === group.trained)
      .map((group) => ({ group, fitting: new Set(group.responses.filter((each) => matches(group, each)).map((each) => each.index)) }))
      .filter((line) => line.fitting.size);
    chosen = Math.max(0, lines.findIndex((line) => String(line.group.group_id) === parameters.group));
    count.textContent = `${lines.length} of ${page.groups.length} groups, ${lines.reduce((sum, line) => sum + line.fitting.size, 0)} responses`;
    space.style.height = lines.length * LINE + "px";
    draw();
    choose(chosen, false);
  }

  function draw() {
    const first = Math.max(0, Math.floor(list.scrollTop / LINE) - MARGIN);
    const last = Math.min(lines.length, Math.ceil((list.scrollTop + list.clientHeight) / LINE) + MARGIN);
    space.replaceChildren(...lines.slice(first, last).map((line, place) => drawLine(line, first + place)));
  }

  function drawLine({ group, fitting }, place) {
    const responses = group.responses;
    const mean = responses.reduce((sum, each) => sum + (Number(each.reward) || 0), 0) / responses.length;
    const tokens = responses.reduce((sum, each) => sum + each.tokens, 0) / responses.length;
    return element("div", {
      class: "group", role: "option", "data-group": group.group_id, "aria-selected": String(place === chosen), "aria-current": String(place === chosen), id: `group-${group.group_id}`,
      style: `top: ${place * LINE}px`, onclick: (event) => event.target.closest("a") || choose(place),
    },
      element("div", { class: "question" }, element("b", {}, `${group.group_id} `), group.question),
      element("div", { class: "strip" }, ...responses.map((each) => element("a", {
        href: href(["run", run, "step", step, String(group.group_id), String(each.index)]),
        class: (right(each) ? "right" : "wrong") + (fitting.has(each.index) ? "" : " out"), tabindex: "-1",
        title: `response ${each.index}: reward ${shown(each.reward)}, ${each.tokens} tokens, ${each.calls} calls, ${each.finish_reason}`,
      }, right(each) ? "✓" : "✗"))),
      element("div", { class: "faint" }, `${group.trained ? "kept" : "dropped"} · mean reward ${shown(mean)} · ${tokens.toFixed(0)} tokens`));
  }

  function choose(place, focus = true) {
    chosen = Math.min(Math.max(0, place), Math.max(0, lines.length - 1));
    const line = lines[chosen];
    if (focus && line) {
      const top = chosen * LINE;
      if (top < list.scrollTop) list.scrollTop = top;
      if (top + LINE > list.scrollTop + list.clientHeight) list.scrollTop = top + LINE - list.clientHeight;
      parameters.group = String(line.group.group_id);
      keep();
    }
    draw();
    if (line) list.setAttribute("aria-activedescendant", `group-${line.group.group_id}`);
    detail.replaceChildren(...(line ? [groupDetail(run, step, line.group)] : []));
  }

  function keep() {
    rename(["run", run, "step", step], { ...filters, group: parameters.group });
  }

  async function search(text) {
    filters.text = text;
    found = text ? new Set((await get(`${base}/search?text=${encodeURIComponent(text)}`)).found.map((pair) => pair.join("/"))) : null;
    keep();
    filter();
  }

  const all = page.groups.flatMap((group) => group.responses);
  const select = (name, label, options) => {
    const made = element("select", { "data-filter": name, onchange: () => { filters[name] = made.value; keep(); filter(); } },
      ...options.map(([value, text]) => element("option", { value, selected: filters[name] === value }, text)));
    return element("label", {}, label + " ", made);
  };
  const box = element("input", { type: "search", id: "search", placeholder: "text of prompt or response", value: filters.text,
    onchange: () => search(box.value).catch((error) => (count.textContent = error.message)) });
  const bound = (name, label) => {
    const made = element("input", { type: "number", "data-filter": name, step: "any", size: "6", value: filters[name],
      oninput: () => { filters[name] = made.value; keep(); filter(); } });
    return element("label", {}, label + " ", made);
  };
  const kinds = (values, none) => [["", none], ...[...new Set(values)].sort().map((value) => [value, value])];
  const neighbours = about.steps;
  const place = neighbours.indexOf(Number(step));
  const beside = (change) => neighbours[place + change] !== undefined && (location.hash = href(["run", run, "step", String(neighbours[place + change])]));

  root.append(
    element("h1", {}, `Step ${step}`),
    problemList(page.problems) ?? "",
    element("div", { class: "controls" },
      element("button", { type: "button", onclick: () => beside(-1), disabled: place <= 0 }, "‹ step"),
      element("button", { type: "button", onclick: () => beside(1), disabled: place < 0 || place + 1 >= neighbours.length }, "step ›"),
      element("a", { href: href(["run", run, "time", step]) }, "its time"),
      box,
      select("verdict", "verdict", [["", "any"], ["right", "right"], ["wrong", "wrong"]]),
      select("kept", "groups", [["", "all"], ["kept", "kept"], ["dropped", "dropped"]]),
      select("tools", "tools", [...kinds(all.flatMap((each) => each.tool_statuses), "any"), ["none", "no call"]]),
      select("end", "end", kinds(all.map((each) => each.finish_reason), "any")),
      select("masked", "masked", [["", "any"], ["some", "some tokens"], ["none", "no token"]]),
      bound("reward", "reward from"),
      bound("accuracy", "accuracy from"),
      bound("difference", "largest |d| above"),
      count),
    element("div", { class: "step-body" }, list, detail));
  list.addEventListener("scroll", draw, { passive: true });

  return {
    ready: () => { filter(); if (filters.text) search(filters.text).catch(() => {}); if (parameters.group) choose(chosen); },
    keys: [
      ["j", "next group", () => choose(chosen + 1)],
      ["k", "previous group", () => choose(chosen - 1)],
      ["Enter", "first response of the group that fits", () => {
        const line = lines[chosen];
        if (line) location.hash = href(["run", run, "step", step, String(line.group.group_id), String([...line.fitting][0])]);
      }],
      ["/", "search", () => box.focus()],
      ["[", "step before", () => beside(-1)],
      ["]", "step after", () => beside(1)],
    ],
  };
}

function groupDetail(run, step, group) {
  const address = (index) => href(["run", run, "step", step, String(group.group_id), String(index)]);
  const rows = group.responses.map((each) => row(
    element("a", { href: address(each.index) }, `response ${each.index}`),
    element("span", { class: right(each) ? "good" : "bad" }, right(each) ? "✓ right" : "✗ wrong"),
    shown(each.reward), each.prediction ?? "none was found",
    Object.entries(each.why).map(([name, value]) => `${name} ${shown(value)}`).join(", "),
    each.tokens, each.turns, each.tool_statuses.join(", ") || "no call", each.finish_reason,
    each.masked_share === null ? element("span", { class: "nowrap" }, "not trained on") : shown(each.masked_share), shown(each.largest_difference)));
  return element("div", {},
    element("h2", {}, `Group ${group.group_id}`, element("span", { class: "faint" }, group.trained ? " kept" : " dropped")),
    element("p", {}, element("b", {}, "question "), group.question),
    element("p", {}, element("b", {}, "ground truth "), group.ground_truth ?? "not in the data"),
    table(["", "verdict", "reward", "prediction", "what the grader said", "tokens", "turns", "tools", "end", "masked", "largest |d|"], rows, { "aria-label": `responses of group ${group.group_id}` }));
}
