// Routes: what the address after # names is shown.

const app = typeof document === "undefined" ? null : document.getElementById("app");
let drawing = 0;

async function draw() {
  try {
    await drawRoute();
  } catch (error) {
    app.dataset.route = location.hash;
    app.replaceChildren(h("nav", {}, h("a", { href: "#" }, "Curves and steps")), h("p", { role: "alert" }, `This view cannot be shown: ${error.message}`));
  }
}

async function drawRoute() {
  const number = ++drawing;
  const route = parseRoute(location.hash);
  let content, title;
  if (route.view === "curves") {
    title = page.runs.map((_, i) => runName(i)).join(" and ");
    content = [leftOut(), curvesView(), stepsView(), settings()];
  } else if (!page.runs[route.run]) {
    title = "Not here";
    content = [h("p", {}, "The page has no such run.")];
  } else if (route.view === "prompt") {
    title = "One prompt over the steps";
    content = await promptView(route);
  } else {
    const block = await loadBlock(route.run, route.file);
    const entry = page.runs[route.run].files[route.file];
    title = entry ? fileTitle(entry) : "Not here";
    if (!block) content = [h("p", {}, "The page does not have the samples of this step. Write one that has with --steps.")];
    else if (route.view === "step") content = stepView(route, block);
    else if (route.view === "group") {
      title = `Group ${block.samples.group_names[route.group]} · ${title}`;
      content = groupView(route, block);
    } else {
      const i = block.samples.line.indexOf(route.sample);
      title = `Sample ${i < 0 ? "" : block.samples.index[i] ?? route.sample} · ${title}`;
      content = sampleView(route, block);
    }
  }
  if (number !== drawing) return; // another address was asked for meanwhile
  const head = h("h1", { tabindex: -1 }, title);
  document.title = `${title} – fusionrl`;
  app.replaceChildren(h("header", {}, crumbs(route), head), fill(h("main", {}), {}, content));
  app.dataset.route = location.hash;
  window.scrollTo(0, 0);
  if (location.hash) head.focus({ preventScroll: true });
}

function crumbs(route) {
  const parts = [h("a", { href: "#" }, "Curves and steps")];
  if (route.view !== "curves" && page.runs[route.run]) {
    const run = page.runs[route.run];
    if (page.runs.length > 1) parts.push(h("span", { class: `key run${route.run}` }, runName(route.run)));
    if (route.file !== undefined && run.files[route.file]) {
      if (route.view !== "step") parts.push(link({ run: route.run, file: route.file }, fileTitle(run.files[route.file])));
      parts.push(...neighbours(route, run));
    }
  }
  return h("nav", { "aria-label": "Where you are" }, parts.flatMap((part) => [part, " "]));
}

// Links to the file of the same kind before and after this one.
function neighbours(route, run) {
  const kind = run.files[route.file].kind;
  const same = run.files.map((file, i) => i).filter((i) => run.files[i].kind === kind && run.files[i].block);
  const here = same.indexOf(route.file);
  const found = [];
  if (here > 0) found.push(link({ run: route.run, file: same[here - 1], sort: route.sort }, "← step before"));
  if (here >= 0 && here + 1 < same.length) found.push(link({ run: route.run, file: same[here + 1], sort: route.sort }, "step after →"));
  return found;
}

function leftOut() {
  const said = page.runs.flatMap((run, i) => run.left_out.map((one) => `${page.runs.length > 1 ? `${runName(i)}: ` : ""}${one}`));
  return said.length ? h("details", { class: "left-out" }, h("summary", {}, "Left out of this page"), h("ul", {}, said.map((one) => h("li", {}, one)))) : null;
}

function settings() {
  return h("section", {}, h("h2", {}, "Settings"), page.runs.map((run, i) =>
    fold(page.runs.length > 1 ? runName(i) : run.path, longText(JSON.stringify(run.config, null, 2), 100000))));
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    app.textContent = "This browser is too old for the page: it needs DecompressionStream (2023).";
    return;
  }
  await loadMain();
  window.addEventListener("hashchange", draw);
  await draw();
  document.documentElement.dataset.ready = "yes";
}

if (app)
  start().catch((error) => {
    app.textContent = `The page's data cannot be read: ${error.message}`;
  });
