// Small pieces all pages are made of. Text goes in as text: nothing here reads markup, whatever a model wrote.

/**
 * An element with attributes and children; a string is text, null is left out, on… is a listener.
 * @param {string} tag
 * @param {Object<string, any>} [attributes]
 * @param {...(Node | string | number | null | undefined)} children
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((c) => (typeof c === "number" ? shown(c) : c)));
  return made;
}

/** A number as people read it; a dash where there is none. */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "Infinity" ? "∞" : value === "-Infinity" ? "−∞" : value;
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

/** Seconds as 42 s, 12 min, 3.4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return (seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(0)) + " s";
  return seconds < 7200 ? (seconds / 60).toFixed(0) + " min" : (seconds / 3600).toFixed(1) + " h";
}

/** @param {string[]} problems what could not be read, for the head of a page */
export function problemList(problems) {
  return problems && problems.length ? element("ul", { class: "problems", role: "alert" }, ...problems.map((text) => element("li", {}, text))) : null;
}

/** A table with a heading row; cells are what element() takes. */
export function table(headings, rows, attributes = {}) {
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": attributes["aria-label"] || "table" },
    element("table", attributes,
      element("thead", {}, element("tr", {}, ...headings.map((h) => element("th", { scope: "col" }, h)))),
      element("tbody", {}, ...rows)));
}

export const row = (...cells) => element("tr", {}, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : element("td", {}, cell))));

/** The address of a page, for a link. */
export function href(parts, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  return "#/" + parts.map(encodeURIComponent).join("/") + (words.size ? "?" + words : "");
}
