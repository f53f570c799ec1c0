// The router: an address after # names a page and its parameters; each page is a module with render().
// Addresses are permanent links: everything that a page shows can be had again from them.

import { element, href } from "./elements.js";

const routes = [
  [/^\/$/, "runs", []],
  [/^\/run\/([^/]+)$/, "run", ["run"]],
  [/^\/run\/([^/]+)\/step\/(\d+)$/, "step", ["run", "step"]],
  [/^\/run\/([^/]+)\/step\/(\d+)\/(\d+)\/(\d+(?:\.\d+)?)$/, "response", ["run", "step", "group", "index"]],
  [/^\/run\/([^/]+)\/time$/, "time", ["run"]],
  [/^\/run\/([^/]+)\/time\/(\d+)$/, "time", ["run", "step"]],
  [/^\/compare$/, "compare", []],
];

const main = document.getElementById("main");
/**
 * The page that is shown. state: what it was drawn from; now: asks for that again, where a run that trains may change it.
 * @type {{keys: [string, string, (event: KeyboardEvent) => void][], leave?: () => void, state?: string, now?: () => Promise<string>}}
 */
let page = { keys: [] };
let visit = 0;

async function show(again = false) {
  const mine = ++visit;
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  const parameters = { ...Object.fromEntries(new URLSearchParams(query)) };
  const found = routes.find(([pattern]) => pattern.test(path));
  const before = page;
  if (!again) {
    before.leave?.();
    page = { keys: [] };
  }
  drawPath(path);
  const root = element("div", { class: "page", "data-page": found ? found[1] : "none" });
  if (!again) main.replaceChildren(element("p", { class: "busy", role: "status" }, "reading …"));
  try {
    if (!found) throw new Error("There is no page " + path);
    const values = path.match(found[0]).slice(1).map(decodeURIComponent);
    found[2].forEach((name, place) => (parameters[name] = values[place]));
    const module = await import(`./${found[1]}_page.js`);
    const drawn = (await module.render(root, parameters)) || {};
    if (mine !== visit) return drawn.leave?.();
    if (again) before.leave?.();
    page = { keys: [], ...drawn };
    main.replaceChildren(root);
    page.ready?.();
  } catch (error) {
    if (mine === visit) main.replaceChildren(element("p", { class: "problems", role: "alert" }, error.message));
  }
  document.body.dataset.shown = location.hash;
}

const REFRESH_MILLISECONDS = 5000;

setInterval(async () => {
  const { now, state } = page;
  const mine = visit;
  if (!now || document.hidden || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName)) return;
  try {
    if ((await now()) === state || mine !== visit) return;
  } catch {
    return; // The server is away, or the run is being written: the next time tells.
  }
  const place = scrollY;
  await show(true);
  scrollTo(0, place);
}, REFRESH_MILLISECONDS);

function drawPath(path) {
  const [, , run, kind, ...rest] = path.split("/").map(decodeURIComponent);
  const steps = [["runs", href([])]];
  if (path.startsWith("/run/")) steps.push([run === "." ? "run" : run, href(["run", run])]);
  if (kind === "step") steps.push(["step " + rest[0], href(["run", run, "step", rest[0]])]);
  if (rest.length > 1) steps.push([`response ${rest[1]}/${rest[2]}`, null]);
  if (kind === "time") steps.push([rest.length ? "time of step " + rest[0] : "time", null]);
  if (path === "/compare") steps.push(["compare", null]);
  const parts = steps.map(([text, to]) => (to ? element("a", { href: to }, text) : element("span", {}, text)));
  document.getElementById("path").replaceChildren(...parts.flatMap((part, place) => (place ? [" › ", part] : [part])));
  document.title = steps.map(([text]) => text).slice(-2).reverse().join(" · ") + " · megatron-retool";
}

/** The same page under another address, without drawing it again. */
export function rename(path, query) {
  history.replaceState(null, "", href(path, query));
  document.body.dataset.shown = location.hash;
}

function showKeys() {
  const dialog = document.getElementById("keys");
  const always = [["?", "these keys"], ["g", "to the table of runs"], ["u", "one level up"]];
  const rows = [...always, ...page.keys].map(([key, text]) => element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, key)), element("td", {}, text)));
  dialog.replaceChildren(element("table", {}, element("tbody", {}, ...rows)), element("button", { type: "button", onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) return event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.getElementById("keys").open) return;
  if (event.key === "?") return showKeys();
  if (event.key === "g") return void (location.hash = "#/");
  if (event.key === "u") {
    const links = document.querySelectorAll("#path a");
    const last = links[links.length - 1];
    const up = last && last.getAttribute("href") === location.hash.split("?")[0] ? links[links.length - 2] : last;
    return void up?.click();
  }
  const found = page.keys.find(([key]) => key === event.key);
  if (found) {
    event.preventDefault();
    found[2](event);
  }
});
document.getElementById("help").addEventListener("click", showKeys);

const theme = document.getElementById("theme");
const chosen = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
try {
  const kept = localStorage.getItem("theme");
  if (kept) document.documentElement.dataset.theme = kept;
} catch {
  // A file opened without a server may have no storage: then the system's choice stands.
}
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = chosen() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch {
    // As above.
  }
  show();
});

addEventListener("hashchange", () => show());
show();
