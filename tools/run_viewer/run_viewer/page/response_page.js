// A response as the model wrote it, token by token: turns, folded tool calls, colours, the numbers of a token, jumps to
// the next large difference, and a second response of the group beside it.

import { get, runPath } from "./api.js";
import { rename } from "./app.js";
import { element, href, problemList, shown } from "./elements.js";
import { colourOf, legend } from "./colours.js";

const PIECE = 400; // tokens after which a piece of the text may end, at the next end of a line
const SPECIAL = /^<\|?[^<>\s]+\|?>$/;

export async function render(root, parameters) {
  const { run, step } = parameters;
  const base = `${runPath(run)}/steps/${step}`;
  const addresses = [`${parameters.group}/${parameters.index}`, ...(parameters.beside ? [parameters.beside] : [])];
  const [list, ...responses] = await Promise.all([get(base), ...addresses.map((each) => get(`${base}/${each}`))]);
  const group = list.groups.find((each) => String(each.group_id) === parameters.group);
  const indices = group ? group.responses.map((each) => String(each.index)) : [];
  const kinds = responses.reduce((all, each) => ({ ...each.kinds, ...all }), {});
  const query = { color: parameters.color in kinds ? parameters.color : "surprise" in kinds ? "surprise" : Object.keys(kinds)[0], token: parameters.token, beside: parameters.beside, above: parameters.above || "0.1" };
  const numbers = element("aside", { class: "numbers", id: "numbers", "aria-live": "polite" });
  const sides = responses.map((response) => drawResponse(response));
  const key = element("span", { class: "legend", id: "legend" });
  let chosen = null; // {side, place}

  function keep() {
    rename(["run", run, "step", step, parameters.group, parameters.index], query);
  }

  function paint() {
    sides.forEach((side) => side.paint(query.color));
    key.replaceChildren(...legend(kinds[query.color], responses[0]?.hues));
  }

  function choose(side, place, scroll = true) {
    root.querySelectorAll(".token.chosen").forEach((each) => { each.classList.remove("chosen"); each.removeAttribute("tabindex"); });
    const span = sides[side]?.spans[place];
    if (!span) return;
    chosen = { side, place };
    span.closest("details")?.setAttribute("open", "");
    span.classList.add("chosen");
    span.tabIndex = 0;
    span.focus({ preventScroll: true });
    if (scroll) span.scrollIntoView({ block: "center" });
    tell(side, place);
    if (side === 0) {
      query.token = String(place);
      keep();
    }
  }

  function tell(side, place) {
    const response = responses[side];
    const cells = [["token", place], ["id", response.ids[place]], ["text", JSON.stringify(response.texts[place])],
      ...Object.entries(response.columns).map(([name, column]) => [name, name === "rejected_by" ? response.reasons[column[place]] ?? shown(column[place]) : shown(column[place])])];
    numbers.replaceChildren(element("table", {}, element("tbody", {}, ...cells.map(([name, value]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", { "data-column": name }, String(value)))))));
  }

  function jump(direction) {
    const side = chosen?.side ?? 0;
    const column = responses[side].columns.log_ratio;
    if (!column) return;
    const large = (value) => value !== null && (typeof value === "string" || Math.abs(value) > Number(query.above));
    for (let place = (chosen?.place ?? (direction > 0 ? -1 : column.length)) + direction; place >= 0 && place < column.length; place += direction) {
      if (large(column[place])) return choose(side, place);
    }
    numbers.replaceChildren(element("p", {}, `no ${direction > 0 ? "later" : "earlier"} token with |d| > ${query.above}`));
  }

  const other = (change) => {
    const next = indices[indices.indexOf(parameters.index) + change];
    if (next !== undefined) location.hash = href(["run", run, "step", step, parameters.group, String(next)], { color: query.color });
  };
  const colour = element("select", { id: "color", onchange: () => { query.color = colour.value; keep(); paint(); } },
    ...Object.keys(kinds).map((name) => element("option", { value: name, selected: name === query.color }, name)));
  const above = element("input", { id: "above", type: "number", min: "0", step: "any", value: query.above, size: "5", oninput: () => { query.above = above.value; keep(); } });
  const second = element("select", { id: "beside", onchange: () => { location.hash = href(["run", run, "step", step, parameters.group, parameters.index], { ...query, beside: second.value }); } },
    element("option", { value: "" }, "nothing"),
    ...indices.filter((index) => String(index) !== parameters.index).map((index) => element("option", { value: `${parameters.group}/${index}`, selected: query.beside === `${parameters.group}/${index}` }, `response ${index}`)));

  root.append(
    problemList(responses.flatMap((each) => each.problems)) ?? "",
    element("div", { class: "controls" },
      element("button", { type: "button", id: "previous", onclick: () => other(-1) }, "‹ response"),
      element("button", { type: "button", id: "next", onclick: () => other(1) }, "response ›"),
      element("label", {}, "colour ", colour), key,
      element("label", {}, "|d| above ", above),
      element("button", { type: "button", id: "jump", onclick: () => jump(1) }, "next such token"),
      element("label", {}, "beside ", second)),
    element("div", { class: "sides" }, ...sides.map((side) => side.root)), numbers);

  const place = (event) => {
    const span = event.target.closest?.(".token");
    return span ? [Number(span.dataset.side), Number(span.dataset.place)] : null;
  };
  sides.forEach((side, number) => side.spans.forEach((span) => (span.dataset.side = number)));
  root.addEventListener("mouseover", (event) => place(event) && tell(...place(event)));
  root.addEventListener("click", (event) => place(event) && choose(...place(event), false));
  return {
    ready: () => { paint(); if (query.token) choose(0, Number(query.token)); },
    keys: [
      ["j", "next response of the group", () => other(1)],
      ["k", "previous response of the group", () => other(-1)],
      ["n", "next token whose |d| is above the bound", () => jump(1)],
      ["p", "previous such token", () => jump(-1)],
      ["Escape", "put the numbers away", () => numbers.replaceChildren()],
      [".", "next token", () => choose(chosen?.side ?? 0, (chosen?.place ?? -1) + 1)],
      [",", "token before", () => choose(chosen?.side ?? 0, (chosen?.place ?? 1) - 1)],
      ["c", "next colour", () => { colour.selectedIndex = (colour.selectedIndex + 1) % colour.options.length; colour.dispatchEvent(new Event("change")); }],
      ["f", "unfold or fold all tool calls", () => {
        const folds = [...root.querySelectorAll("details.call")];
        const open = folds.some((each) => !each.open);
        folds.forEach((each) => (each.open = open));
      }],
    ],
  };
}

/** One response: {root, spans by token, paint(column)}. */
function drawResponse(response) {
  const spans = new Array(response.length);
  const calls = callsByTurn(response);
  const blocks = response.turns.map(({ turn, start, end }) => {
    const text = () => pieces(response, start, end, spans);
    if (turn >= 0) return element("div", { class: "turn", "data-turn": turn }, element("div", { class: "head" }, `turn ${turn}, ${end - start} tokens`), ...text());
    const made = calls.get(start) || [];
    const summary = made.map((call) => `${call.name} ${call.status} ${call.seconds.toFixed(2)} s${call.output_truncated ? ", output cut" : ""}`).join("; ");
    return element("details", { class: "turn tool call" }, element("summary", {}, summary || `not sampled, ${end - start} tokens`), ...made.map(callDetail), ...text());
  });
  const late = calls.get(-1) || [];
  const facts = [`reward ${shown(response.reward)}`, `${response.length} tokens`, response.finish_reason, response.trained ? "trained on" : "not trained on"];
  const info = Object.entries(response.reward_info).map(([name, value]) => `${name}: ${shown(value)}`).join(", ");
  const root = element("article", { "data-response": `${response.group_id}/${response.index}` },
    element("h1", {}, `Response ${response.group_id}/${response.index}`),
    element("p", {}, facts.join(" · ")),
    element("p", {}, element("b", {}, "grader "), info),
    element("p", {}, element("b", {}, "ground truth "), String(response.extra_info.ground_truth ?? "not in the data")),
    element("details", {}, element("summary", {}, `prompt, ${response.prompt_tokens} tokens`), element("pre", {}, response.prompt)),
    element("div", { class: "tokens" }, ...blocks, ...late.map(callDetail)));
  const paint = (name) => {
    const kind = response.kinds[name];
    const column = response.columns[name] || [];
    spans.forEach((span, place) => (span.style.background = kind ? colourOf(kind, column[place], response.hues) : ""));
  };
  return { root, spans, paint };
}

/** The tool calls by the first token of what they returned; -1: of those that returned nothing. */
function callsByTurn(response) {
  const found = new Map();
  const results = response.turns.filter(({ turn }) => turn < 0);
  response.tool_calls.forEach((call, number) => {
    const result = call.position >= 0 ? results.find(({ start }) => start > call.position) : results[number];
    const place = result ? result.start : -1;
    found.set(place, [...(found.get(place) || []), call]);
  });
  return found;
}

function callDetail(call) {
  let code = call.arguments;
  try {
    const words = JSON.parse(call.arguments);
    code = typeof words.code === "string" ? words.code : JSON.stringify(words, null, 1);
  } catch {
    // What the model wrote is no JSON: it is shown as it is.
  }
  return element("div", {}, element("div", { class: "faint" }, `${call.name}: ${call.status}, ${call.seconds.toFixed(3)} s, ${call.output_tokens} tokens returned`), element("pre", {}, code));
}

/** The tokens of a stretch as spans, in pieces that a browser lays out only when they come into sight. */
function pieces(response, start, end, spans) {
  const made = [];
  let piece = element("div", { class: "piece" });
  for (let place = start; place < end; place++) {
    const text = response.texts[place];
    const span = element("span", { class: "token" + (SPECIAL.test(text) ? " special" : "") + (/^\n+$/.test(text) ? " break" : ""), "data-place": place }, text);
    spans[place] = span;
    piece.append(span);
    if (piece.childNodes.length >= PIECE && text.endsWith("\n")) {
      made.push(piece);
      piece = element("div", { class: "piece" });
    }
  }
  if (piece.childNodes.length) made.push(piece);
  return made;
}
