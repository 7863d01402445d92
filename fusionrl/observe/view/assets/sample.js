// One sample: its numbers, its prompt, its tokens, its turns, and all else that its file says of it.

function sampleView(route, block) {
  const samples = block.samples, i = samples.line.indexOf(route.sample), row = block.rows[route.sample];
  if (i < 0) return [h("p", {}, "The file has no sample on this line.")];
  const value = (name) => (at(samples[name], i) === null ? null : formatNumber(at(samples[name], i)));
  const numbers = facts([
    ["group", link({ run: route.run, file: route.file, group: samples.group[i] }, samples.group_names[samples.group[i]])],
    ["reward", formatNumber(samples.reward[i])], ["trained reward", value("trained_reward")], ["advantage", value("advantage")],
    ["mismatch", value("mismatch")], ["tokens", formatNumber(samples.length[i])], ["trained on", value("num_trained")],
    ["status", block.statuses[samples.status[i]]], ["removed", row && row.is_removed ? "yes: it is not trained on" : null],
  ]);
  if (!row) return [numbers, h("p", {}, "Its text and tokens are not on this page, which has room for some samples only. Write one of this step alone with --steps.")];
  const vocabulary = page.runs[route.run].vocabulary;
  return [
    numbers, promptPart(route, row), imagesPart(row, block), h("h2", {}, "Answer by token"), tokenView(row, vocabulary), turnsPart(row, vocabulary),
    fold("Answer as text", longText(textOf(row.response), 20000)),
    row.prompt_tokens ? fold("Prompt by token", longText(promptTokens(row, vocabulary), 20000)) : null,
    row.messages ? fold("Messages", longText(JSON.stringify(row.messages, null, 2), 20000)) : null,
    row.reward && typeof row.reward === "object" ? fold("Parts of the reward", longText(JSON.stringify(row.reward, null, 2), 20000)) : null,
    row.metadata ? fold("Metadata", longText(JSON.stringify(row.metadata, null, 2), 20000)) : null,
  ];
}

// The images of the prompt and of tools, small; none where the run did not keep them.
function imagesPart(row, block) {
  if (!row.images) return null;
  const sources = row.images.map((key) => (block.images || {})[key]);
  return h("section", {}, h("h2", {}, `Images: ${row.images.length}`), h("div", { class: "images" },
    sources.map((src, i) => (src ? h("img", { src, alt: `image ${i + 1}` }) : h("span", {}, `image ${i + 1} is not on this page`)))));
}

function fold(title, content) {
  return h("details", {}, h("summary", {}, title), content);
}

// Each token of the prompt between bars, so that a template's tokens are told apart.
function promptTokens(row, vocabulary) {
  return tokenTexts(row.prompt_tokens, vocabulary).join("│");
}

// Turns: stretches of the model's tokens, and of those that a tool or an environment wrote between them.
function turnsPart(row, vocabulary) {
  if (!row.tokens) return null;
  const segments = segmentsOf(row.mask, row.tokens.length);
  if (segments.length < 2) return null;
  const texts = tokenTexts(row.tokens, vocabulary);
  return h("section", {}, h("h2", {}, `Turns: ${formatNumber(segments.length)} stretches of tokens`),
    h("ol", { class: "turns" }, segments.slice(0, 200).map((one) => h("li", { class: one.trained ? "model" : "tool" },
      h("p", {}, one.trained ? "trained on" : "not trained on: a tool, an environment, or masked", ` · tokens ${one.start} to ${one.end - 1}`),
      longText(texts.slice(one.start, one.end).join(""), 4000)))));
}
