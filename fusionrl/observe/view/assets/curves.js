// The first view: curves of all runs over the steps.

const PREFERRED = [
  /^rollout\/raw_reward$/, /^rollout\/accuracy$/, /^eval\/.*\/(accuracy|reward)$/, /^eval\/.*\/loss$/, /^train\/loss$/,
  /^train\/entropy$/, /^train\/logprob_diff_mean$/, /^train\/grad_norm$/, /^rollout\/response_len\/mean$/,
  /^rollout\/truncated_ratio$/, /^rollout\/zero_std_groups$/, /^perf\/step_time_s$/, /^perf\/tokens_per_s$/,
];
const WIDTH = 420, HEIGHT = 150, LEFT = 4, RIGHT = 4, TOP = 8, BOTTOM = 8;
const MOST_CHARTS = 60;

function curvesView() {
  const names = [...new Set(page.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  const usual = PREFERRED.flatMap((wanted) => names.filter((name) => wanted.test(name)));
  const charts = h("div", { class: "charts" });
  const said = h("p", { "aria-live": "polite", class: "hint" });
  const search = h("input", { type: "search", id: "metric-filter", placeholder: "part of a name, e.g. logprob" });

  function draw() {
    const wanted = search.value.trim().toLowerCase();
    const chosen = wanted ? names.filter((name) => name.toLowerCase().includes(wanted)) : usual.length ? usual : names;
    charts.replaceChildren(...chosen.slice(0, MOST_CHARTS).map(chart));
    const more = chosen.length > MOST_CHARTS ? `; the first ${MOST_CHARTS} are shown` : "";
    said.textContent = `${plural(chosen.length, "curve")} of ${plural(names.length, "metric")}${more}. Circles mark jumps: each leads to the samples of its step.`;
  }

  search.addEventListener("input", draw);
  draw();
  return h("section", { "aria-labelledby": "curves-title" },
    h("h2", { id: "curves-title" }, "Curves"),
    page.runs.length > 1 ? h("p", {}, page.runs.map((_, i) => h("span", { class: `key run${i}` }, runName(i)))) : null,
    h("label", { for: "metric-filter" }, "Metrics "), search, said, charts);
}

// Where a step and a value stand in a chart of these runs.
function placing(name) {
  const steps = rangeOf(page.runs.flatMap((run) => (run.metrics[name] ? [run.steps[0], run.steps[run.steps.length - 1]] : [])));
  const values = page.runs.map((run) => rangeOf(run.metrics[name] || [])).filter((range) => range !== null).flat();
  const range = rangeOf(values) || [0, 1];
  const pad = (range[1] - range[0]) * 0.05 || Math.abs(range[0]) * 0.05 || 1;
  const [low, high] = [range[0] - pad, range[1] + pad];
  const width = WIDTH - LEFT - RIGHT, height = HEIGHT - TOP - BOTTOM;
  return {
    range, steps,
    x: (step) => LEFT + (steps[1] > steps[0] ? ((step - steps[0]) / (steps[1] - steps[0])) * width : width / 2),
    y: (value) => TOP + ((high - value) / (high - low)) * height,
    step: (x) => steps[0] + ((x - LEFT) / width) * (steps[1] - steps[0]),
  };
}

function chart(name) {
  const place = placing(name);
  const canvas = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: 0, role: "img", "aria-label": describe(name) });
  const links = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "links", role: "group", "aria-label": `Jumps of ${name}` });
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: -9, x2: -9 });
  const reading = h("output", { class: "reading", "aria-live": "polite" }, latest(name));
  page.runs.forEach((run, number) => {
    const values = run.metrics[name];
    if (!values) return;
    const places = decimate(values, WIDTH);
    const points = places.map((i) => `${place.x(run.steps[i]).toFixed(1)},${place.y(values[i]).toFixed(1)}`);
    canvas.append(points.length === 1
      ? svg("circle", { class: `point run${number}`, cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3 })
      : svg("polyline", { class: `line run${number}`, points: points.join(" ") }));
    for (const i of run.spikes[name] || []) links.append(marker(number, name, i, place, "jumps to"));
    for (const i of (run.nonfinite[name] || []).slice(0, 50)) links.append(marker(number, name, i, place, "is not finite"));
  });
  canvas.append(cursor);
  const state = { run: 0, i: -1 };

  function read(run, i) {
    state.run = run;
    state.i = i;
    const one = page.runs[run];
    cursor.setAttribute("x1", place.x(one.steps[i]));
    cursor.setAttribute("x2", place.x(one.steps[i]));
    reading.textContent = `${page.runs.length > 1 ? `${runName(run)}, ` : ""}step ${one.steps[i]}: ${formatNumber(one.metrics[name][i])}`;
  }

  function pick(event) {
    const box = canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH, y = ((event.clientY - box.top) / box.height) * HEIGHT;
    let best = null;
    page.runs.forEach((run, number) => {
      const values = run.metrics[name];
      if (!values) return;
      const i = nearestValue(values, nearest(run.steps, place.step(x)));
      if (i < 0) return;
      const away = Math.abs(place.y(values[i]) - y);
      if (best === null || away < best.away) best = { number, i, away };
    });
    if (best !== null) read(best.number, best.i);
  }

  function open() {
    if (state.i < 0) return;
    const file = nearestFile(state.run, page.runs[state.run].steps[state.i]);
    if (file === undefined) reading.textContent = "this page has no samples of this run";
    else location.hash = routeTo({ run: state.run, file, sort: sortFor(name) });
  }

  function key(event) {
    if (event.key === "Enter") return open();
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    if (!page.runs[state.run].metrics[name]) state.run = page.runs.findIndex((run) => run.metrics[name]);
    const values = page.runs[state.run].metrics[name];
    let i = state.i < 0 ? (by > 0 ? -1 : values.length) : state.i;
    do i += by; while (i >= 0 && i < values.length && values[i] === null);
    if (i >= 0 && i < values.length) read(state.run, i);
  }

  canvas.addEventListener("mousemove", pick);
  canvas.addEventListener("click", (event) => { pick(event); open(); });
  canvas.addEventListener("keydown", key);
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("strong", {}, name), " ", reading),
    h("div", { class: "plot" }, canvas, links.childElementCount ? links : null,
      [...new Set(place.range)].map((value) => h("span", { class: "axis", top: `${place.y(value)}px`, "aria-hidden": "true" }, formatNumber(value)))),
    h("p", { class: "axis steps", "aria-hidden": "true" }, place.steps.map((step) => h("span", {}, `step ${formatNumber(step)}`))));
}

// A circle that leads to the samples of a step. Where they are not on the page, to those of the nearest step that has.
function marker(number, name, i, place, said) {
  const run = page.runs[number], step = run.steps[i], value = run.metrics[name][i];
  const file = nearestFile(number, step);
  const label = `${name} ${said}${value === null ? "" : ` ${formatNumber(value)}`} at step ${step}`;
  const y = value === null ? TOP : place.y(value);
  const circle = svg("circle", { class: `spike run${number}`, cx: place.x(step).toFixed(1), cy: y.toFixed(1), r: 5 }, svg("title", {}, label));
  if (file === undefined) return circle;
  return svg("a", { href: routeTo({ run: number, file, sort: sortFor(name) }), "aria-label": `${label}: its samples` }, circle);
}

function latest(name) {
  const parts = page.runs.map((run) => {
    const values = run.metrics[name] || [];
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return `${formatNumber(values[i])}`;
    return "–";
  });
  return parts.join(" | ");
}

// A curve in words, for those who do not see it.
function describe(name) {
  const parts = page.runs.map((run, number) => {
    const values = run.metrics[name] || [];
    const range = rangeOf(values);
    if (range === null) return `${runName(number)}: no finite value`;
    const low = run.steps[values.indexOf(range[0])], high = run.steps[values.indexOf(range[1])];
    const first = values.find((value) => value !== null), last = values.findLast((value) => value !== null);
    return `${page.runs.length > 1 ? `${runName(number)}: ` : ""}from ${formatNumber(first)} to ${formatNumber(last)}, lowest ${formatNumber(range[0])} at step ${low}, highest ${formatNumber(range[1])} at step ${high}`;
  });
  return `${name}. ${parts.join("; ")}. Left and right arrows read values, Enter shows samples.`;
}
