// Tests of the pure part of the page's script; run by test_view.py with node.
"use strict";
const assert = require("assert");
const path = require("path");
const core = require(path.join(__dirname, "../../fusionrl/observe/view/assets/core.js"));

// Numbers
assert.deepStrictEqual([0, 12345, 0.123456, 1e-7, -2.5e9, null].map(core.formatNumber), ["0", "12,345", "0.1235", "1.00e-7", "-2,500,000,000", "–"]);
assert.strictEqual(core.formatNumber(0.5), "0.5");
assert.deepStrictEqual(core.rangeOf([null, 3, -1, undefined]), [-1, 3]);
assert.strictEqual(core.rangeOf([null]), null);
assert.strictEqual(core.nearest([1, 5, 9], 6), 1);
assert.strictEqual(core.nearest([1, 5, 9], 100), 2);
assert.strictEqual(core.nearest([1, 5, 9], -4), 0);
assert.strictEqual(core.nearestValue([1, null, null, 4, null, null], 5), 3, "right of the last value");
assert.deepStrictEqual([0, 1, 2].map((i) => core.nearestValue([null, 5, null], i)), [1, 1, 1]);
assert.strictEqual(core.nearestValue([null, null], 1), -1);

// A curve of many points keeps its extremes, and no more than two a column.
const values = Array.from({ length: 10000 }, (_, i) => Math.sin(i / 300));
values[4321] = 50;
values[77] = -50;
values[5000] = null;
const kept = core.decimate(values, 400);
assert.ok(kept.length <= 800 && kept.includes(4321) && kept.includes(77) && !kept.includes(5000));
assert.deepStrictEqual(kept, [...kept].sort((a, b) => a - b));
assert.deepStrictEqual(core.decimate([1, null, 3], 400), [0, 2]);

// Routes there and back; what is no route is the first view.
for (const target of [{ run: 0, file: 12 }, { run: 1, file: 0, group: 3 }, { run: 0, file: 2, sample: 640 }, { run: 0, prompt: 7 }, { run: 0, file: 1, sort: "mismatch" }]) {
  const { view, ...found } = core.parseRoute(core.routeTo(target));
  assert.deepStrictEqual(found, target);
  assert.notStrictEqual(view, "curves");
}
for (const hash of ["", "#", "#/x/y", "#/run/-1/file/../x", "#/constructor/1/__proto__/2"]) assert.strictEqual(core.parseRoute(hash).view, "curves", hash);
assert.strictEqual(core.sortFor("train/logprob_diff_mean"), "mismatch");
assert.strictEqual(core.sortFor("rollout/raw_reward"), "worst");

// Filters and orders
const block = {
  statuses: ["completed", "failed", "truncated"],
  samples: { line: [0, 1, 2, 3, 4], group: [0, 0, 1, 1, 2], reward: [1, 1, 0, 0.5, null], length: [3, 9, 4, 4, 1], status: [0, 2, 0, 1, 0], mismatch: [0.1, 0.3, null, 0.2, 0] },
  rows: { 0: { prompt: "Sum?", response: "four", label: null }, 2: { prompt: [{ role: "user", content: "hello" }], response: "x", label: 7 } },
};
const chosen = (filter) => core.chooseSamples(block, filter);
assert.deepStrictEqual(chosen({ order: "file" }), [0, 1, 2, 3, 4]);
assert.deepStrictEqual(chosen({ order: "worst" }), [2, 3, 0, 1, 4]);
assert.deepStrictEqual(chosen({ order: "best" }), [0, 1, 3, 2, 4]);
assert.deepStrictEqual(chosen({ order: "mismatch" }), [1, 3, 0, 4, 2]);
assert.deepStrictEqual(chosen({ order: "longest" }), [1, 2, 3, 0, 4]);
assert.deepStrictEqual(chosen({ order: "advantage" }), [0, 1, 2, 3, 4], "of a run that has none");
assert.deepStrictEqual(chosen({ equal: true }), [0, 1]);
assert.deepStrictEqual(chosen({ truncated: true }), [1]);
assert.deepStrictEqual(chosen({ failed: true }), [3]);
assert.deepStrictEqual(chosen({ text: "FOUR" }), [0]);
assert.deepStrictEqual(chosen({ text: "user: hello" }), [2]);
assert.deepStrictEqual(chosen({ text: "7" }), [2]);

// Tokens: characters of several tokens, unknown tokens, the end within a character
const vocabulary = { 1: "a", 2: "\xc3", 3: "\xa4", 4: "</script>" };
assert.deepStrictEqual(core.tokenTexts([1, 2, 3, 4, 9], vocabulary), ["a", "", "ä", "</script>", "[9]"]);
assert.deepStrictEqual(core.tokenTexts([1, 2], vocabulary), ["a", "�"]);
assert.deepStrictEqual(core.tokenTexts([2, 9, 3], vocabulary), ["", "�[9]", "�"]);
assert.deepStrictEqual(core.tokenTexts([5], null), ["[5]"]);
assert.strictEqual(core.cutNote({ tokens: [1, 2], num_tokens: 2 }) + core.cutNote({ num_tokens: 2 }), "");
assert.ok(core.cutNote({ tokens: [1, 2], num_tokens: 5000 }).includes("the first 2 of 5,000 tokens"));
const row = { gap: [0, -2, 1, null], version: 4, entropy: [0, 0, 0, 0], engine: [-1, -1, -1, null], mask: [1, 0, 0, 1] };
assert.deepStrictEqual(core.scaleOf(row, "mismatch"), { kind: "signed", limit: 2, low: -2, high: 1 });
assert.deepStrictEqual(core.scaleOf(row, "version"), { kind: "kinds", values: [4] });
assert.strictEqual(core.scaleOf(row, "advantage"), null);
const scale = core.scaleOf(row, "mismatch");
const healthy = core.scaleOf({ gap: [5e-6, -2e-6, 0] }, "mismatch");
assert.strictEqual(core.colorOf(5e-6, healthy) + core.colorOf(-2e-6, healthy), "", "rounding has no colour");
assert.ok(core.colorOf(-0.02, core.scaleOf({ gap: [-0.02, 5e-6] }, "mismatch")).includes("0.60"));
assert.ok(core.colorOf(-2, scale).startsWith("hsl(0 ") && core.colorOf(1, scale).startsWith("hsl(140 "));
assert.strictEqual(core.colorOf(0, scale) + core.colorOf(null, scale) + core.colorOf(0, core.scaleOf(row, "entropy")), "");
assert.deepStrictEqual(core.worstTokens(row.gap, 4, 2), [1, 2]);
assert.deepStrictEqual(core.worstTokens(row.version, 4, 2), [], "one value of all tokens has no worst");
assert.deepStrictEqual(core.segmentsOf(row.mask, 4).map((one) => [one.start, one.end, one.trained]), [[0, 1, true], [1, 3, false], [3, 4, true]]);
assert.strictEqual(core.segmentsOf(undefined, 3).length, 1);
assert.strictEqual(core.trainerLogProb(row, 1), -3);
assert.strictEqual(core.trainerLogProb(row, 3), null);

// What Python packs is unpacked.
const zlib = require("zlib");
const packed = zlib.deflateRawSync(Buffer.from('{"a":[1,"ü"]}')).toString("base64");
core.unpack(packed).then((value) => assert.deepStrictEqual(value, { a: [1, "ü"] })).catch((error) => {
  console.error(error);
  process.exit(1);
});
