// Curves by Plotly, which index.html loads. Charts of one page share their cursor and their zoom over the steps.

import { element, shown } from "./elements.js";

/** Okabe and Ito's colours, which people who confuse red and green tell apart; each run has one, and a dash too. */
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Of a run or a phase, by its place. */
export const colour = (place) => COLOURS[place % COLOURS.length];

/**
 * What all charts have in common: the page's colours, no toolbar, the legend above. Below, its distance would be a share
 * of the chart's height: over the title of a low chart's axis, and far away from a high chart.
 */
export function layout({ own, ...more } = {}) {
  const axis = { gridcolor: variable("--line"), zerolinecolor: variable("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: variable("--ink"), size: 12 },
    margin: { t: 10, r: 10, b: 36, l: 48 }, hovermode: "x unified", hoverlabel: { bgcolor: variable("--raised"), font: { color: variable("--ink") } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, showlegend: false, ...more,
    xaxis: { ...axis, title: { text: "step" }, showspikes: true, spikemode: "across", spikethickness: 1, spikecolor: variable("--faint"), ...more.xaxis },
    yaxis: { ...axis, ...more.yaxis },
  };
}

/** Numbers as Plotly takes them: what is no finite number is a gap. */
export const finite = (values) => values.map((value) => (typeof value === "number" ? value : null));

/**
 * An exponential mean of the values so far; a step without a value leaves a gap and changes nothing.
 * @param {(number | null)[]} values
 * @param {number} weight of what was before, 0 to 1
 */
export function smoothed(values, weight) {
  let sum = 0;
  let parts = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    parts = weight * parts + (1 - weight);
    return sum / parts;
  });
}

/** Lines of one metric: for each run the values as they are, faint where they are smoothed too. */
export function lines(runs, weight) {
  return runs.flatMap(({ name, steps, values, place }) => {
    const drawn = finite(values);
    const few = drawn.filter((value) => value !== null).length < 20;
    const line = { color: colour(place), width: 1.6, dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length] };
    const base = { x: steps, connectgaps: true, mode: few ? "lines+markers" : "lines", line, type: "scatter" };
    const raw = { ...base, y: drawn, name, opacity: weight ? 0.3 : 1, customdata: values.map(shown), hovertemplate: "%{customdata}" };
    return weight ? [raw, { ...base, y: smoothed(drawn, weight), name: name + ", smoothed", mode: "lines", hovertemplate: "%{y:.5g}" }] : [raw];
  });
}

/** Charts that are drawn once they stand on the page, and follow one another's cursor and zoom. */
export class Charts {
  constructor() {
    this.waiting = [];
    this.drawn = [];
    this.following = false;
  }

  /** A place for a chart; ``caption`` stands below it. */
  add(traces, wanted, caption = [], label = "chart") {
    const place = element("div", { class: "chart", role: "img", "aria-label": label });
    if (wanted.height) place.style.minHeight = wanted.height + "px";
    this.waiting.push([place, traces, wanted]);
    return element("figure", {}, element("strong", {}, label), place, element("figcaption", {}, ...caption));
  }

  /** Draw what was added; the places must be on the page. */
  ready() {
    if (!globalThis.Plotly) {
      for (const [place] of this.waiting.splice(0)) place.replaceChildren(element("p", { class: "problems" }, "Plotly's script is not there: curves cannot be drawn"));
      return;
    }
    for (const [place, traces, wanted] of this.waiting.splice(0)) {
      Plotly.newPlot(place, traces, layout(wanted), { displayModeBar: false, responsive: true });
      if (wanted.own) continue;
      this.drawn.push(place);
      place.on("plotly_hover", (event) => this.each(place, (other) => Plotly.Fx.hover(other, { xval: event.xvals?.[0] ?? event.points[0].x })));
      place.on("plotly_unhover", () => this.each(place, (other) => Plotly.Fx.unhover(other)));
      place.on("plotly_relayout", (change) => {
        const range = change["xaxis.range"] ?? (change["xaxis.range[0]"] !== undefined ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
        if (range) this.each(place, (other) => Plotly.relayout(other, { "xaxis.range": range }));
        else if (change["xaxis.autorange"]) this.each(place, (other) => Plotly.relayout(other, { "xaxis.autorange": true, "yaxis.autorange": true }));
      });
    }
  }

  each(place, follow) {
    if (this.following) return;
    this.following = true;
    try {
      this.drawn.filter((other) => other !== place && other.isConnected).forEach(follow);
    } finally {
      // Plotly says what it did after it has done it, so the echo comes a little later.
      setTimeout(() => (this.following = false), 0);
    }
  }

  leave() {
    this.drawn.forEach((place) => globalThis.Plotly?.purge(place));
    this.drawn = [];
  }
}
