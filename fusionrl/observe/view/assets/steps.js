// The table of steps, the samples of a step, a group side by side, and a prompt over the steps.

const STEP_COLUMNS = [
  ["reward", "rollout/raw_reward"], ["accuracy", "rollout/accuracy"], ["length", "rollout/response_len/mean"],
  ["truncated", "rollout/truncated_ratio"], ["equal groups", "rollout/zero_std_groups"],
  ["mismatch", "train/logprob_diff_mean"], ["entropy", "train/entropy"], ["gradient", "train/grad_norm"],
  ["staleness", "rollout/staleness/token_max"], ["seconds", "perf/step_time_s"],
];

function stepsView() {
  const rows = [];
  page.runs.forEach((run, number) => {
    const steps = new Set([...run.steps, ...run.files.map((file) => file.step)]);
    for (const step of steps) rows.push({ run: number, step, place: run.placeOf.get(step) });
  });
  rows.sort((a, b) => a.step - b.step || a.run - b.run);
  const value = (row, name) => {
    const values = page.runs[row.run].metrics[name];
    return values && row.place !== undefined ? values[row.place] : null;
  };
  const used = STEP_COLUMNS.filter(([, name]) => page.runs.some((run) => run.metrics[name]));
  const columns = [
    { title: "step", key: (row) => row.step, cell: stepCell },
    ...(page.runs.length > 1 ? [{ title: "run", key: (row) => row.run, cell: (row) => runName(row.run) }] : []),
    ...used.map(([title, name]) => ({ title, key: (row) => value(row, name), cell: (row) => formatNumber(value(row, name)) })),
    { title: "others", cell: otherFiles },
  ];
  return h("section", { "aria-labelledby": "steps-title" },
    h("h2", { id: "steps-title" }, "Steps"), pagedTable("Steps, with their samples behind the number", columns, rows, 100));
}

function stepCell(row) {
  const file = page.runs[row.run].fileOf.get(row.step);
  return file === undefined ? String(row.step) : link({ run: row.run, file }, String(row.step));
}

function otherFiles(row) {
  const found = [];
  page.runs[row.run].files.forEach((file, i) => {
    if (file.step === row.step && file.kind !== "train" && file.block) found.push(link({ run: row.run, file: i }, file.kind), " ");
  });
  return found;
}

function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value instanceof Node ? value : String(value)))));
}

// ---------------------------------------------------------------- one step
function stepView(route, block) {
  const run = page.runs[route.run], entry = run.files[route.file];
  const filter = { order: ORDERS[route.sort] ? route.sort : "file", equal: false, truncated: false, failed: false, text: "" };
  const list = h("div", {});

  function draw() {
    list.replaceChildren(sampleTable(route, block, chooseSamples(block, filter)));
  }

  const order = h("select", { id: "order", onchange: () => { filter.order = order.value; draw(); } },
    Object.entries(ORDERS).map(([name, [title]]) => h("option", { value: name, selected: name === filter.order }, title)));
  const text = h("input", { type: "search", id: "text-filter", oninput: () => { filter.text = text.value; draw(); } });
  const box = (name, title) => h("label", {}, h("input", { type: "checkbox", "data-filter": name, onchange: (event) => { filter[name] = event.target.checked; draw(); } }), ` ${title}`);
  draw();
  return [
    facts([
      ["samples", formatNumber(entry.samples)], ["groups", formatNumber(entry.groups)], ["reward", formatNumber(entry.reward)],
      ["groups with equal rewards", formatNumber(entry.equal)], ["mean length", formatNumber(entry.length)],
      ["truncated", formatNumber(entry.truncated)], ["failed", formatNumber(entry.failed)],
      ["worst mismatch", formatNumber(entry.mismatch)],
      ["with text and tokens here", entry.kept < entry.samples ? formatNumber(entry.kept) : null],
      ["lines that cannot be read", block.unreadable ? formatNumber(block.unreadable) : null],
    ]),
    h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
      h("label", { for: "order" }, "Order "), order, box("equal", "all-equal groups"), box("truncated", "truncated"),
      box("failed", "failed"), h("label", { for: "text-filter" }, "Text "), text),
    h("h2", {}, "Samples"), list, h("h2", {}, "Groups"), groupTable(route, block),
  ];
}

function sampleTable(route, block, places) {
  const samples = block.samples;
  const column = (title, values) => ({ title, key: (i) => at(values, i), cell: (i) => formatNumber(at(values, i)) });
  const text = (i, name, limit) => {
    const row = block.rows[samples.line[i]];
    return row ? excerpt(textOf(row[name]), limit) : "(not on this page)";
  };
  return pagedTable("Samples of this step", [
    { title: "sample", key: (i) => samples.index[i], cell: (i) => link({ run: route.run, file: route.file, sample: samples.line[i] }, String(samples.index[i] ?? `line ${samples.line[i]}`)) },
    { title: "group", key: (i) => samples.group[i], cell: (i) => link({ run: route.run, file: route.file, group: samples.group[i] }, samples.group_names[samples.group[i]]) },
    column("reward", samples.reward), column("advantage", samples.advantage), column("mismatch", samples.mismatch),
    column("tokens", samples.length), { title: "status", cell: (i) => block.statuses[samples.status[i]] },
    { title: "prompt", cell: (i) => text(i, "prompt", 60) }, { title: "label", cell: (i) => text(i, "label", 40) },
    { title: "answer", cell: (i) => text(i, "response", 120) },
  ], places, 100);
}

function groupTable(route, block) {
  const samples = block.samples;
  const groups = [...groupsOf(samples)].map(([group, places]) => ({ group, places, rewards: places.map((i) => samples.reward[i]) }));
  const mean = (row) => {
    const known = row.rewards.filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const prompt = (row) => {
    const found = row.places.map((i) => block.rows[samples.line[i]]).find((one) => one !== undefined);
    return found ? excerpt(textOf(found.prompt), 100) : "";
  };
  return pagedTable("Groups of this step", [
    { title: "group", key: (row) => row.group, cell: (row) => link({ run: route.run, file: route.file, group: row.group }, samples.group_names[row.group]) },
    { title: "mean reward", key: mean, cell: (row) => formatNumber(mean(row)) },
    { title: "rewards", cell: (row) => row.rewards.slice(0, 32).map(formatNumber).join("  ") },
    { title: "prompt", cell: prompt },
  ], groups, 50);
}

// ---------------------------------------------------------------- one group
function groupView(route, block) {
  const samples = block.samples;
  const places = groupsOf(samples).get(route.group) || [];
  const rows = places.map((i) => ({ i, row: block.rows[samples.line[i]] }));
  const known = rows.find((one) => one.row !== undefined);
  return [
    known ? promptPart(route, known.row) : null,
    h("h2", {}, `${plural(places.length, "answer")}${isEqual(samples, places) ? ", all with the same reward" : ""}`),
    h("div", { class: "side-by-side" }, rows.map(({ i, row }) => h("article", {},
      h("h3", {}, link({ run: route.run, file: route.file, sample: samples.line[i] }, `Sample ${samples.index[i] ?? samples.line[i]}`)),
      facts([["reward", formatNumber(samples.reward[i])], ["advantage", at(samples.advantage, i) === null ? null : formatNumber(at(samples.advantage, i))],
        ["tokens", formatNumber(samples.length[i])], ["status", block.statuses[samples.status[i]]]]),
      row ? longText(textOf(row.response), 3000) : h("p", {}, "Its text is not on this page.")))),
  ];
}

function promptPart(route, row) {
  const places = (page.runs[route.run].repeats || {})[row.prompt_number];
  return h("section", {}, h("h2", {}, "Prompt"), longText(textOf(row.prompt), 5000),
    row.label === null || row.label === undefined ? null : h("p", {}, "Label: ", h("code", {}, excerpt(textOf(row.label), 500))),
    places ? h("p", {}, link({ run: route.run, prompt: row.prompt_number }, `This prompt over the steps: ${plural(places.length, "group")}`)) : null);
}

// ---------------------------------------------------------------- one prompt over the steps
async function promptView(route) {
  const run = page.runs[route.run];
  const places = ((run.repeats || {})[route.prompt] || []).slice(0, 200);
  const rows = [];
  let prompt = null;
  for (const [file, line] of places) {
    const block = await loadBlock(route.run, file);
    if (!block) continue;
    const first = block.samples.line.indexOf(line);
    const members = groupsOf(block.samples).get(block.samples.group[first]) || [];
    prompt = prompt || (block.rows[line] || {}).prompt || null;
    rows.push({ file, block, group: block.samples.group[first], members });
  }
  const mean = (row, name) => {
    const known = row.members.map((i) => at(row.block.samples[name], i)).filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  return [
    prompt === null ? null : longText(textOf(prompt), 5000),
    pagedTable("Groups of this prompt", [
      { title: "step", key: (row) => run.files[row.file].step, cell: (row) => link({ run: route.run, file: row.file, group: row.group }, fileTitle(run.files[row.file])) },
      { title: "mean reward", key: (row) => mean(row, "reward"), cell: (row) => formatNumber(mean(row, "reward")) },
      { title: "rewards", cell: (row) => row.members.slice(0, 32).map((i) => formatNumber(row.block.samples.reward[i])).join("  ") },
      { title: "mean length", key: (row) => mean(row, "length"), cell: (row) => formatNumber(mean(row, "length")) },
    ], rows, 200),
  ];
}
