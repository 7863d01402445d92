"use strict";
// Pure functions of the page: numbers, colours, filters, routes, and the unpacking of its data. No document is needed
// here, so node can test them.

// ---------------------------------------------------------------- data
function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// The value that `step_block.pack` packed: JSON, deflated, in base64.
async function unpack(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}

// The value of token (or sample) i in a column: a list, or one value that all have.
function at(column, i) {
  if (column === undefined || column === null) return null;
  return Array.isArray(column) ? column[i] : column;
}

// ---------------------------------------------------------------- numbers
function formatNumber(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function plural(count, word) {
  return `${formatNumber(count)} ${word}${count === 1 ? "" : "s"}`;
}

// [smallest, largest] of the numbers in a list; null where there is none.
function rangeOf(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low === Infinity ? null : [low, high];
}

// Places of at most 2 values a column of pixels, the lowest and the highest, so that no spike is lost.
function decimate(values, columns) {
  const places = [];
  for (let i = 0; i < values.length; i++) if (values[i] !== null) places.push(i);
  if (places.length <= 2 * columns) return places;
  const kept = [];
  for (let c = 0; c < columns; c++) {
    const from = Math.floor((c * places.length) / columns), to = Math.floor(((c + 1) * places.length) / columns);
    let low = places[from], high = places[from];
    for (let i = from; i < to; i++) {
      if (values[places[i]] < values[low]) low = places[i];
      if (values[places[i]] > values[high]) high = places[i];
    }
    kept.push(Math.min(low, high));
    if (low !== high) kept.push(Math.max(low, high));
  }
  return kept;
}

// The place in a sorted list whose value is nearest.
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - sorted[low - 1] <= sorted[low] - value ? low - 1 : low;
}

// The place nearest to i that has a value, of two the later one; -1: there is none.
function nearestValue(values, i) {
  const has = (j) => values[j] !== null && values[j] !== undefined;
  for (let away = 0; away < values.length; away++) {
    if (has(i + away)) return i + away;
    if (has(i - away)) return i - away;
  }
  return -1;
}

// ---------------------------------------------------------------- routes
// #/run/0/file/12/group/3, #/run/0/file/12/sample/640 (a line of the file), #/run/0/prompt/7
function parseRoute(hash) {
  const parts = decodeURIComponent(hash.replace(/^#\/?/, "")).split("/");
  const found = { view: "curves" };
  for (let i = 0; i + 1 < parts.length; i += 2) {
    const name = parts[i], value = parts[i + 1];
    if (name === "sort") found.sort = value;
    else if (/^\d+$/.test(value) && ["run", "file", "group", "sample", "prompt"].includes(name)) found[name] = Number(value);
  }
  if (found.sample !== undefined) found.view = "sample";
  else if (found.group !== undefined) found.view = "group";
  else if (found.file !== undefined) found.view = "step";
  else if (found.prompt !== undefined) found.view = "prompt";
  return found;
}

function routeTo(target) {
  let route = "#";
  for (const name of ["run", "file", "group", "sample", "prompt", "sort"])
    if (target[name] !== undefined) route += `/${name}/${target[name]}`;
  return route;
}

// The order of a step's samples that shows what a metric is about.
function sortFor(metric) {
  if (/logprob|mismatch|kl|ratio|clip/.test(metric)) return "mismatch";
  if (/response_len|truncated/.test(metric)) return "longest";
  if (/reward|accuracy|pass@/.test(metric)) return "worst";
  if (/advantage|loss|grad/.test(metric)) return "advantage";
  return undefined;
}

// ---------------------------------------------------------------- samples
const ORDERS = {
  file: ["order of the file", null],
  worst: ["lowest reward", (s, i) => at(s.reward, i)],
  best: ["highest reward", (s, i) => negative(at(s.reward, i))],
  mismatch: ["worst mismatch", (s, i) => negative(at(s.mismatch, i))],
  advantage: ["largest advantage", (s, i) => negative(absolute(at(s.advantage, i)))],
  longest: ["longest", (s, i) => negative(at(s.length, i))],
};

function negative(value) {
  return value === null || value === undefined ? null : -value;
}

function absolute(value) {
  return value === null || value === undefined ? null : Math.abs(value);
}

// Places of a step's samples by group: group → places.
function groupsOf(samples) {
  const groups = new Map();
  samples.line.forEach((_, i) => {
    const group = samples.group[i];
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(i);
  });
  return groups;
}

function isEqual(samples, places) {
  const range = rangeOf(places.map((i) => at(samples.reward, i)));
  return range !== null && range[1] - range[0] < 1e-8;
}

// Places of the samples that a filter lets pass, in its order. filter: {order, equal, truncated, failed, text};
// block: what a packed file holds. A text is looked for in the rows that are on the page.
function chooseSamples(block, filter) {
  const samples = block.samples;
  let places = samples.line.map((_, i) => i);
  const status = (i) => block.statuses[samples.status[i]];
  if (filter.truncated) places = places.filter((i) => status(i) === "truncated");
  if (filter.failed) places = places.filter((i) => status(i) === "failed" || status(i) === "aborted");
  if (filter.equal) {
    const equal = new Set();
    for (const [group, members] of groupsOf(samples)) if (isEqual(samples, members)) equal.add(group);
    places = places.filter((i) => equal.has(samples.group[i]));
  }
  if (filter.text) {
    const wanted = filter.text.toLowerCase();
    const holds = (value) => textOf(value).toLowerCase().includes(wanted);
    places = places.filter((i) => {
      const row = block.rows[samples.line[i]];
      return row !== undefined && (holds(row.prompt) || holds(row.response) || holds(row.label));
    });
  }
  const key = (ORDERS[filter.order] || ORDERS.file)[1];
  if (key === null) return places;
  const keys = new Map(places.map((i) => [i, key(samples, i)]));
  const rank = (value) => (value === null || value === undefined ? Infinity : value);
  return places.sort((a, b) => {
    const first = rank(keys.get(a)), second = rank(keys.get(b));
    return first === second ? a - b : first < second ? -1 : 1;
  });
}

// A prompt, an answer or a label as text: messages with their roles.
function textOf(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.length && value.every((part) => part && typeof part === "object" && "content" in part))
    return value.map((part) => `${part.role || ""}: ${textOf(part.content)}`).join("\n");
  return JSON.stringify(value);
}

// ---------------------------------------------------------------- tokens
const KINDS = {
  mask: { column: "mask", title: "trained on", scale: "mask" },
  // least: the full colour stands for so much at least, or the largest rounding of a healthy run would have it.
  mismatch: { column: "gap", title: "trainer − engine, nats", scale: "signed", least: 0.01 },
  entropy: { column: "entropy", title: "entropy, nats", scale: "positive" },
  advantage: { column: "advantage", title: "advantage", scale: "signed" },
  version: { column: "version", title: "weight version", scale: "kinds" },
  logprob: { column: "engine", title: "log-prob of the engine, nats", scale: "signed" },
};

// The text that each token adds. A character of several tokens comes with the last of them; a token that the vocabulary
// lacks is its id.
function tokenTexts(tokens, vocabulary) {
  let decoder = new TextDecoder("utf-8");
  const texts = tokens.map((token) => {
    const piece = vocabulary ? vocabulary[token] : undefined;
    if (piece === undefined) {
      const rest = decoder.decode();
      decoder = new TextDecoder("utf-8");
      return `${rest}[${token}]`;
    }
    return decoder.decode(Uint8Array.from(piece, (c) => c.charCodeAt(0)), { stream: true });
  });
  const rest = decoder.decode();
  if (rest && texts.length) texts[texts.length - 1] += rest;
  return texts;
}

// A sentence where the page has only the first tokens of a response; "" where it has all.
function cutNote(row) {
  if (!row.tokens || !(row.num_tokens > row.tokens.length)) return "";
  return `These are the first ${formatNumber(row.tokens.length)} of ${formatNumber(row.num_tokens)} tokens; the rest is cut.`;
}

// What a colour means: {kind, limit} for numbers, {kind, values} for kinds. null: no token has a value.
function scaleOf(row, name) {
  const kind = KINDS[name];
  const column = row[kind.column];
  if (kind.scale === "mask") return { kind: "mask" };
  const values = Array.isArray(column) ? column : [column];
  const range = rangeOf(values);
  if (range === null) return null;
  if (kind.scale === "kinds") return { kind: "kinds", values: [...new Set(values)].filter((v) => v !== null).sort((a, b) => a - b) };
  return { kind: kind.scale, limit: Math.max(Math.abs(range[0]), Math.abs(range[1]), kind.least || 0), low: range[0], high: range[1] };
}

const HUES = [210, 30, 280, 140, 60, 0];

// The background of a token. Translucent, so that it suits a light and a dark page; "" for none.
function colorOf(value, scale) {
  if (scale === null || value === null || value === undefined) return "";
  if (scale.kind === "mask") return value ? "" : "hsl(0 0% 50% / 0.3)";
  if (scale.kind === "kinds") return `hsl(${HUES[scale.values.indexOf(value) % HUES.length]} 80% var(--tint) / 0.45)`;
  if (!scale.limit) return "";
  const share = Math.min(Math.abs(value) / scale.limit, 1);
  if (share < 0.02) return "";
  return `hsl(${value < 0 ? 0 : scale.kind === "positive" ? 30 : 140} 80% var(--tint) / ${(0.08 + 0.52 * share).toFixed(2)})`;
}

// Places of the tokens with the largest values.
function worstTokens(column, length, count) {
  if (!Array.isArray(column)) return [];
  const places = [];
  for (let i = 0; i < length; i++) if (column[i] !== null) places.push(i);
  return places.sort((a, b) => Math.abs(column[b]) - Math.abs(column[a]) || a - b).slice(0, count);
}

// Stretches of tokens that are trained on, or not: a turn of the model, or what a tool or an environment wrote.
function segmentsOf(mask, length) {
  const found = [];
  for (let i = 0; i < length; i++) {
    const trained = mask === undefined || Boolean(at(mask, i));
    if (!found.length || found[found.length - 1].trained !== trained) found.push({ start: i, end: i, trained });
    found[found.length - 1].end = i + 1;
  }
  return found;
}

// The gap of a token, and from it the trainer's log-prob.
function trainerLogProb(row, i) {
  const engine = at(row.engine, i), gap = at(row.gap, i);
  return engine === null || gap === null ? null : engine + gap;
}

if (typeof module !== "undefined")
  module.exports = {
    unpack, at, formatNumber, plural, rangeOf, decimate, nearest, nearestValue, parseRoute, routeTo, sortFor, groupsOf, isEqual,
    chooseSamples, textOf, tokenTexts, cutNote, scaleOf, colorOf, worstTokens, segmentsOf, trainerLogProb, ORDERS, KINDS,
  };
