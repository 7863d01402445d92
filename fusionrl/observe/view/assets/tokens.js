// The tokens of a response: coloured, read one by one with the mouse or the keyboard, a page of them at a time.

const TOKENS_A_PAGE = 4000;
const LACKING = {
  mismatch: "trainers write it with --save-token-values", entropy: "trainers write it with --save-token-values",
  advantage: "trainers write it with --save-token-values", version: "the rollout has no weight versions", mask: "", logprob: "the engine gave none",
};

function tokenView(row, vocabulary) {
  const tokens = row.tokens;
  if (!tokens || !tokens.length) return h("p", {}, "This sample has no token ids.");
  const texts = tokenTexts(tokens, vocabulary);
  const pages = Math.ceil(tokens.length / TOKENS_A_PAGE);
  const first = ["mismatch", "logprob", "version", "mask"].find((name) => Array.isArray(row[KINDS[name].column])) || "mask";
  const state = { by: first, page: 0, token: -1 };
  const box = h("div", { class: "tokens", role: "listbox", tabindex: 0, "aria-label": "Tokens of the answer; arrow keys move from one to the next" });
  const details = h("output", { class: "details", "aria-live": "polite" }, "Point at a token, or move with the arrow keys.");
  const legend = h("p", { class: "legend" });
  const worst = h("div", {});
  const position = h("span", { "aria-live": "polite" });
  const back = button("Previous tokens", () => show(state.page - 1)), forth = button("Next tokens", () => show(state.page + 1));

  function show(number) {
    state.page = Math.min(Math.max(number, 0), pages - 1);
    const from = state.page * TOKENS_A_PAGE, to = Math.min(from + TOKENS_A_PAGE, tokens.length);
    const scale = scaleOf(row, state.by), column = row[KINDS[state.by].column];
    const spans = [];
    for (let i = from; i < to; i++) {
      const isMasked = row.mask !== undefined && !at(row.mask, i);
      const value = state.by === "mask" ? (isMasked ? 0 : 1) : at(column, i);
      spans.push(h("span", { id: `t${i}`, role: "option", class: isMasked ? "masked" : null, background: colorOf(value, scale) || null }, texts[i]));
    }
    box.replaceChildren(...spans);
    box.removeAttribute("aria-activedescendant");
    position.textContent = `tokens ${formatNumber(from)} to ${formatNumber(to - 1)} of ${formatNumber(tokens.length)}`;
    back.disabled = state.page === 0;
    forth.disabled = state.page === pages - 1;
    state.token = -1;
  }

  function recolor() {
    const scale = scaleOf(row, state.by);
    legend.replaceChildren(...legendOf(scale, state.by));
    worst.replaceChildren(...worstPart());
    show(state.page);
  }

  function read(i, isKey) {
    i = Math.min(Math.max(i, 0), tokens.length - 1);
    if (Math.floor(i / TOKENS_A_PAGE) !== state.page) show(Math.floor(i / TOKENS_A_PAGE));
    const earlier = document.getElementById(`t${state.token}`);
    if (earlier) {
      earlier.classList.remove("current");
      earlier.removeAttribute("aria-selected");
    }
    state.token = i;
    const span = document.getElementById(`t${i}`);
    span.classList.add("current");
    span.setAttribute("aria-selected", "true");
    if (isKey) {
      box.setAttribute("aria-activedescendant", `t${i}`);
      span.scrollIntoView({ block: "nearest" });
    }
    details.textContent = wordsOf(row, texts, i);
  }

  function worstPart() {
    const kind = KINDS[state.by];
    const places = state.by === "mask" || state.by === "version" ? [] : worstTokens(row[kind.column], tokens.length, 10);
    if (!places.length) return [];
    return [h("details", {}, h("summary", {}, `Tokens with the largest values (${kind.title})`), h("ol", {}, places.map((i) => h("li", {},
      button(`token ${i}`, () => { read(i, true); box.focus(); }), ` ${JSON.stringify(texts[i])} ${formatNumber(at(row[kind.column], i))}`))))];
  }

  box.addEventListener("mouseover", (event) => { if (event.target.id.startsWith("t")) read(Number(event.target.id.slice(1)), false); });
  box.addEventListener("click", (event) => { if (event.target.id.startsWith("t")) read(Number(event.target.id.slice(1)), true); });
  box.addEventListener("keydown", (event) => {
    const from = state.token < 0 ? state.page * TOKENS_A_PAGE - 1 : state.token;
    const target = { ArrowRight: from + 1, ArrowLeft: from - 1, ArrowDown: from + 20, ArrowUp: from - 20, Home: 0, End: tokens.length - 1,
      PageDown: from + TOKENS_A_PAGE, PageUp: from - TOKENS_A_PAGE }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    read(target, true);
  });
  const choice = h("fieldset", { class: "filters" }, h("legend", {}, "Colour by"), Object.keys(KINDS).map((name) => {
    const lacks = scaleOf(row, name) === null;
    return h("label", { class: lacks ? "lacking" : null, title: lacks ? LACKING[name] : null },
      h("input", { type: "radio", name: "by", value: name, checked: name === first, disabled: lacks, onchange: () => { state.by = name; recolor(); } }),
      ` ${name}${lacks ? ` (${LACKING[name]})` : ""}`);
  }));
  const jump = h("input", { type: "number", id: "jump", min: 0, max: tokens.length - 1, onchange: () => read(Number(jump.value) || 0, true) });
  recolor();
  return h("div", {}, choice, legend,
    vocabulary ? null : h("p", { class: "hint" }, "Ids in place of text: the tokenizer was not found; --tokenizer FOLDER names it."),
    cutNote(row) ? h("p", { class: "hint" }, cutNote(row)) : null,
    pages > 1 ? h("div", { class: "pager" }, back, position, forth) : null,
    box, details, h("p", {}, h("label", { for: "jump" }, "Go to token "), jump), worst);
}

function wordsOf(row, texts, i) {
  const parts = [`token ${i} ${JSON.stringify(texts[i])}`, `id ${row.tokens[i]}`];
  const add = (title, value) => { if (value !== null) parts.push(`${title} ${formatNumber(value)}`); };
  add("engine", at(row.engine, i));
  add("trainer", trainerLogProb(row, i));
  add("trainer − engine", at(row.gap, i));
  add("entropy", at(row.entropy, i));
  add("advantage", at(row.advantage, i));
  add("weights", at(row.version, i));
  if (row.mask !== undefined && !at(row.mask, i)) parts.push("not trained on");
  return parts.join(" · ");
}

function legendOf(scale, by) {
  const swatch = (value, text) => h("span", { class: "swatch", background: colorOf(value, scale) || null }, text);
  if (scale === null) return ["No token has a value."];
  if (scale.kind === "mask") return [swatch(1, "trained on"), " ", swatch(0, "not trained on: the prompt's, a tool's or an environment's")];
  if (scale.kind === "kinds") return scale.values.slice(0, 30).flatMap((value) => [swatch(value, `weights ${value}`), " "]);
  const { limit } = scale, title = KINDS[by].title;
  if (scale.kind === "positive") return [`${title}: `, swatch(0, "0"), " ", swatch(limit, formatNumber(limit))];
  return [`${title}: `, ...[scale.low, 0, scale.high].filter((value, i) => i === 1 || value * (i - 1) > 0)
    .flatMap((value) => [swatch(value, formatNumber(value)), " "])];
}
