// The page's data: runs, and the samples of their files, unpacked when they are looked at.

const page = { runs: [], blocks: new Map() };

async function loadMain() {
  const main = await unpack(document.getElementById("main").textContent);
  page.runs = main.runs;
  for (const run of page.runs) {
    run.placeOf = new Map(run.steps.map((step, i) => [step, i]));
    run.fileOf = new Map();
    run.files.forEach((file, i) => {
      if (file.kind === "train" && file.block) run.fileOf.set(file.step, i);
    });
    run.stepsWithSamples = [...run.fileOf.keys()].sort((a, b) => a - b);
  }
}

// The samples of a file: {samples, statuses, rows}; null where the page does not have them. The last few stay unpacked.
async function loadBlock(run, file) {
  const entry = page.runs[run] && page.runs[run].files[file];
  if (!entry || !entry.block) return null;
  if (page.blocks.has(entry.block)) return page.blocks.get(entry.block);
  const element = document.getElementById(entry.block);
  const block = element ? await unpack(element.textContent) : await fetchBlock(page.runs[run], entry);
  if (!block) return null;
  page.blocks.set(entry.block, block);
  if (page.blocks.size > 12) page.blocks.delete(page.blocks.keys().next().value);
  return block;
}

// The samples of a file from the page's server, where it has one, with what the page did not know of the file.
async function fetchBlock(run, entry) {
  const answer = await fetch(`block/${encodeURIComponent(entry.block)}`);
  if (!answer.ok) throw new Error(await answer.text());
  const [samples, more] = (await answer.text()).split("\n");
  const { facts, vocabulary } = await unpack(more);
  Object.assign(entry, facts);
  if (vocabulary) run.vocabulary = Object.assign(run.vocabulary || {}, vocabulary);
  return unpack(samples);
}

// Where the samples of a step are: its file, or that of the nearest step that has one. undefined: nowhere.
function nearestFile(run, step) {
  const steps = page.runs[run].stepsWithSamples;
  return steps.length ? page.runs[run].fileOf.get(steps[nearest(steps, step)]) : undefined;
}

function runName(run) {
  const names = page.runs.map((one) => one.name);
  return names.filter((name) => name === names[run]).length > 1 ? page.runs[run].path : names[run];
}

function fileTitle(entry) {
  const attempt = entry.attempt > 1 ? `, attempt ${entry.attempt}` : "";
  if (entry.kind === "train") return `Step ${entry.step}${attempt}`;
  if (entry.kind.startsWith("eval-") && entry.kind !== "eval-failed") return `Evaluation ${entry.kind.slice(5)} at step ${entry.step}${attempt}`;
  return `Samples at which a function raised, step ${entry.step}${attempt}`;
}
