// Elements. Texts of models and data only ever become text nodes: nothing here takes HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "background" || name === "top") element.style[name] = value; // the page's policy refuses "style"
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function link(target, ...children) {
  return h("a", { href: routeTo(target) }, children);
}

function button(text, onclick, attributes) {
  return h("button", { type: "button", onclick, ...attributes }, text);
}

// A table. columns: [{title, cell: (row) => node or text, key: (row) => number or text for sorting}].
// Shows `size` rows at a time; a click on a title sorts.
function pagedTable(caption, columns, rows, size) {
  const state = { page: 0, by: null, down: false };
  const body = h("tbody", {});
  const position = h("span", { "aria-live": "polite" });
  const heads = columns.map((column) => {
    const head = h("th", { scope: "col" }, column.key ? button(column.title, () => sortBy(column)) : column.title);
    return head;
  });
  const pages = () => Math.max(Math.ceil(rows.length / size), 1);
  const back = button("Previous rows", () => turn(-1));
  const forth = button("Next rows", () => turn(1));

  function turn(by) {
    state.page = Math.min(Math.max(state.page + by, 0), pages() - 1);
    draw();
  }

  function sortBy(column) {
    state.down = state.by === column ? !state.down : true;
    state.by = column;
    const sign = state.down ? -1 : 1;
    const known = (value) => value !== null && value !== undefined;
    rows = [...rows].sort((a, b) => {
      const first = column.key(a), second = column.key(b);
      if (!known(first) || !known(second)) return known(second) - known(first);
      return first < second ? -sign : first > second ? sign : 0;
    });
    state.page = 0;
    draw();
  }

  function draw() {
    columns.forEach((column, i) => {
      if (state.by === column) heads[i].setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else heads[i].removeAttribute("aria-sort");
    });
    const shown = rows.slice(state.page * size, (state.page + 1) * size);
    body.replaceChildren(...shown.map((row) => h("tr", {}, columns.map((c, i) => h(i ? "td" : "th", i ? {} : { scope: "row" }, c.cell(row))))));
    back.disabled = state.page === 0;
    forth.disabled = state.page >= pages() - 1;
    const first = state.page * size;
    position.textContent = rows.length ? `${formatNumber(first + 1)} to ${formatNumber(first + shown.length)} of ${formatNumber(rows.length)}` : "none";
  }

  draw();
  const table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, heads)), body);
  const scroll = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table);
  return h("div", { class: "paged" }, scroll, h("div", { class: "pager" }, back, position, forth));
}

// A text of the data, shortened to `limit` characters with the rest on demand.
function longText(text, limit) {
  const box = h("pre", { class: "text" }, text.length > limit ? text.slice(0, limit) : text);
  if (text.length <= limit) return box;
  const more = button(`Show all ${formatNumber(text.length)} characters`, () => {
    box.textContent = text;
    more.remove();
  });
  return h("div", {}, box, more);
}

function excerpt(text, limit) {
  const flat = text.replace(/\s+/g, " ").trim();
  return flat.length > limit ? `${flat.slice(0, limit)}…` : flat;
}
