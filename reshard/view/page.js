"use strict";
(() => {
  const started = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const ROW = 28;
  const MAX_LISTED = 200;

  // Texts. Names come from files of others: they become text nodes only, and marks that change how text reads are shown.
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const clean = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  const lines = (text) => String(text).split("\n").map(clean).join("\n");
  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") made.className = value;
      else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) made.setAttribute(key, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };
  const number = new Intl.NumberFormat("en");
  const plain = (value) => number.format(value);
  const bytes = (size) => {
    if (size === null || size === undefined) return "-";
    let unit = 0;
    while (size >= 1024 && unit < 5) { size /= 1024; unit++; }
    return unit ? `${size.toFixed(1)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}` : `${size} B`;
  };
  const plural = (count, noun) => `${plain(count)} ${noun}${count === 1 ? "" : "s"}`;
  const ranges = (numbers, most = 12) => {
    const words = [];
    for (let at = 0; at < numbers.length;) {
      let end = at;
      while (end + 1 < numbers.length && numbers[end + 1] === numbers[end] + 1) end++;
      words.push(end === at ? `${numbers[at]}` : `${numbers[at]}${end - at > 1 ? "-" : ","}${numbers[end]}`);
      at = end + 1;
    }
    return words.length > most ? `${words.slice(0, most).join(",")} ... (${plural(numbers.length, "number")})` : words.join(",");
  };
  const counted = (noun, numbers) => `${noun}${numbers.length === 1 ? "" : "s"} ${ranges(numbers)}`;
  const shape = (dims) => `[${dims.join(", ")}]`;

  // Numbers in the few characters of reshard/view/page.py.
  const repeated = (found) => {
    const values = [];
    for (let at = 0; at < found.length; at += 2) for (let n = 0; n < found[at + 1]; n++) values.push(found[at]);
    return values;
  };
  const strided = (found) => {
    let values = [found[0]];
    for (let at = 1; at < found.length; at += 2) {
      const next = [];
      for (let n = 0; n < found[at]; n++) for (const value of values) next.push(value + n * found[at + 1]);
      values = next;
    }
    return values;
  };

  const unit = data.unit;
  const counter = unit === "rank" ? unit : "number";
  const files = {
    number: data.files.number, path: data.files.path, bytes: repeated(data.files.bytes),
    state: repeated(data.files.state), same: repeated(data.files.same),
  };
  const fileOf = new Map(files.number.map((value, at) => [value, at]));
  const aliases = new Map(data.files.aliases);
  const fileNumber = (holder) => aliases.get(holder) ?? holder;
  const fileNumbers = (holders) => [...new Set(holders.map(fileNumber))].sort((a, b) => a - b);
  const names = data.parameters.name;
  const shown = names.map(clean);
  const typeOf = (p) => data.types[data.parameters.type[p]];
  const [DTYPE, SHAPES, BYTES, STORED, FILES, KIND] = [0, 1, 2, 3, 4, 5];
  const layoutOf = (p) => data.layouts[data.parameters.layout[p]] || null;
  const sizeOf = (p) => typeOf(p)[BYTES] ?? typeOf(p)[STORED];
  const copiesOf = (sharding) => sharding.holders.copies ?? Math.max(...sharding.holders.lists.map((each) => each.length));
  const cutsOf = (p) => {
    const layout = layoutOf(p);
    if (!layout) return "-";
    const { cuts } = layout.shardings[0];
    const copies = copiesOf(layout.shardings[0]);
    return (cuts.some((n) => n > 1) ? `cut ${cuts.join(" x ")}` : "whole") + (copies > 1 ? `, ${copies} copies` : "");
  };

  // Slices.
  const allHolders = (sharding) => {
    if (!sharding.slices) {
      const { holders } = sharding;
      if (holders.lists) sharding.slices = holders.lists;
      else {
        const flat = strided(holders.strides);
        sharding.slices = [];
        for (let at = 0; at < flat.length; at += holders.copies) sharding.slices.push(flat.slice(at, at + holders.copies));
      }
      sharding.lacking = new Set(sharding.absent);
    }
    return sharding.slices;
  };
  const placeOf = (slice, cuts) => {
    const place = [];
    for (let d = cuts.length - 1; d >= 0; d--) { place[d] = slice % cuts[d]; slice = Math.floor(slice / cuts[d]); }
    return place;
  };
  const boxOf = (sharding, dims, slice) => placeOf(slice, sharding.cuts).map((at, d) => {
    const edges = sharding.edges[d];
    return edges ? [edges[at], edges[at + 1]] : [dims[d] / sharding.cuts[d] * at, dims[d] / sharding.cuts[d] * (at + 1)];
  });
  const boxText = (box) => `[${box.map(([start, stop]) => `${start}:${stop}`).join(", ")}]`;
  const stateOf = (sharding, slice) => {
    const holders = allHolders(sharding)[slice];
    const live = holders.filter((file) => !sharding.lacking.has(file)).length;
    return live === holders.length ? "held" : live ? "part" : "lost";
  };

  // Places in files: per structure, from parameter to offset and size.
  const structureOf = new Map();
  const structures = data.structures;
  if (structures) structures.files.forEach((found, at) => {
    for (const file of Array.isArray(found) ? strided(found) : found.list) structureOf.set(file, at);
  });
  const places = new Map();
  const placeIn = (file, p) => {
    const at = structureOf.get(file);
    if (at === undefined) return null;
    if (!places.has(at)) {
      const found = new Map();
      const [steps, gaps, sizes] = ["parameters", "gaps", "bytes"].map((key) => repeated(structures[key][at]));
      let parameter = 0, end = 0;
      steps.forEach((step, n) => {
        parameter += step;
        found.set(parameter, [end + gaps[n], sizes[n]]);
        end += gaps[n] + sizes[n];
      });
      places.set(at, found);
    }
    return places.get(at).get(p) ?? null;
  };
  const pathOf = (file) => {
    const at = fileOf.get(fileNumber(file));
    return at === undefined || files.path[at] === null ? null : files.path[at];
  };

  // A list of any length: rows exist only where they are seen.
  class List {
    constructor(label, columns, { height = 460, tree = false, onpick = () => {}, onsort = null, onfold = () => {} } = {}) {
      Object.assign(this, { columns, tree, onpick, onsort, onfold, count: 0, active: -1, id: List.next = (List.next || 0) + 1 });
      this.rows = el("div", { class: "rows", role: "rowgroup" });
      this.head = el("div", { class: "head", role: "row", "aria-rowindex": 1 }, ...columns.map((column, at) => el(
        "div", { class: (column.numeric ? "n" : "") + (column.wide ? " wide" : ""), role: "columnheader" },
        onsort && column.sort !== false ? el("button", { type: "button", onclick: () => onsort(at) }, column.title)
          : el("button", { type: "button", tabindex: -1, disabled: "" }, column.title))));
      this.host = el("div", {
        class: "grid", role: tree ? "treegrid" : "grid", tabindex: 0, "aria-label": label, "aria-colcount": columns.length,
        onscroll: () => this.later(), onkeydown: (event) => this.key(event),
      }, this.head, this.rows);
      this.host.style.maxHeight = `${height}px`;
      this.host.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
      this.host.style.setProperty("--narrow", columns.filter((column) => !column.wide).map((column) => column.width).join(" "));
      new ResizeObserver(() => this.later()).observe(this.host);
    }
    sorted(at, descending) {
      [...this.head.children].forEach((cell, n) => cell.setAttribute("aria-sort", n === at ? (descending ? "descending" : "ascending") : "none"));
      this.columns.forEach((column, n) => {
        this.head.children[n].firstChild.textContent = column.title + (n === at ? (descending ? " ▾" : " ▴") : "");
      });
    }
    show(count, cells, about = () => ({})) {
      Object.assign(this, { count, cells, about });
      this.host.setAttribute("aria-rowcount", count + 1);
      this.rows.style.height = `${count * ROW}px`;
      this.active = Math.min(this.active, count - 1);
      this.draw();
    }
    later() {
      if (!this.waiting) this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
    }
    draw() {
      if (!this.cells) return;
      const first = Math.max(0, Math.floor(this.host.scrollTop / ROW) - 8);
      const last = Math.min(this.count, Math.ceil((this.host.scrollTop + (this.host.clientHeight || 600)) / ROW) + 8);
      const made = [];
      for (let at = first; at < last; at++) {
        const about = this.about(at);
        const row = el("div", {
          class: `row${at === this.active ? " on" : ""}`, role: "row", id: `list${this.id}-${at}`, "aria-rowindex": at + 2,
          "aria-selected": at === this.active, "aria-level": about.level, "aria-expanded": about.expanded,
          onclick: () => { this.pick(at); if (about.expanded !== undefined) this.onfold(at); },
        }, ...this.cells(at).map((cell, n) => {
          const column = this.columns[n];
          const made = el("div", { class: `cell${column.numeric ? " n" : ""}${column.mono ? " m" : ""}${column.wide ? " wide" : ""}`, role: "gridcell" }, cell);
          if (n === 0 && about.level) made.style.paddingLeft = `${8 + 14 * (about.level - 1)}px`;
          if (about.title && n === 0) made.title = about.title;
          return made;
        }));
        row.style.top = `${at * ROW}px`;
        made.push(row);
      }
      this.rows.replaceChildren(...made);
      if (this.active >= first && this.active < last) this.host.setAttribute("aria-activedescendant", `list${this.id}-${this.active}`);
      else this.host.removeAttribute("aria-activedescendant");
    }
    pick(at) {
      if (at < 0 || at >= this.count) return;
      this.active = at;
      const top = at * ROW, room = this.host.clientHeight - ROW - 4;
      if (top < this.host.scrollTop) this.host.scrollTop = top;
      else if (top + ROW > this.host.scrollTop + room) this.host.scrollTop = top + ROW - room;
      this.draw();
      this.onpick(at);
    }
    key(event) {
      if (event.target !== this.host) return;
      const page = Math.max(1, Math.floor(this.host.clientHeight / ROW) - 2);
      const to = {
        ArrowDown: this.active + 1, ArrowUp: Math.max(0, this.active - 1), Home: 0, End: this.count - 1,
        PageDown: Math.min(this.count - 1, this.active + page), PageUp: Math.max(0, this.active - page),
      }[event.key];
      const expanded = this.active >= 0 ? this.about(this.active).expanded : undefined;
      if (to !== undefined) this.pick(to);
      else if (event.key === "ArrowRight" && expanded === false) this.onfold(this.active);
      else if (event.key === "ArrowLeft" && expanded === true) this.onfold(this.active);
      else if ((event.key === "Enter" || event.key === " ") && expanded !== undefined) this.onfold(this.active);
      else return;
      event.preventDefault();
    }
  }

  const redraws = [];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const sized = (canvas, width, height) => {
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return context;
  };

  // Header and problems.
  const state = { true: "complete", false: "not complete", null: "completeness not checked" }[String(data.complete)];
  const present = files.state.filter((each) => each !== "missing").length;
  const total = files.bytes.reduce((sum, size) => sum + size, 0);
  const summary = [
    data.form, data.step === null ? null : `step ${clean(data.step)}`, state,
    `${plural(present, "file")}, ${bytes(total)}`, plural(names.length, "parameter"),
    data.full_bytes === null ? null : `${bytes(data.full_bytes)} whole`,
  ].filter(Boolean).join(" · ");
  const LEVELS = ["Problem", "Not certain", "Note"];
  const problems = el("section", { id: "problems" }, el("h2", {}, "Problems"),
    data.problems.length ? el("ul", { class: "problems", tabindex: 0, "aria-label": "Problems" }, ...data.problems.map((problem) => el(
      "li", { class: `l${problem.level}` }, el("strong", {}, LEVELS[problem.level]), el("span", { class: "text" }, lines(problem.text)),
      problem.hint ? el("div", { class: "hint text" }, lines(problem.hint)) : null)))
      : el("p", {}, "None found in names, sizes and headers. Contents were not compared."));

  // Parameters: a tree by the dots of names, or a list where it is sorted by anything else.
  const collator = new Intl.Collator("en", { numeric: true });
  const root = { label: "", children: new Map(), leaf: -1 };
  names.forEach((name, p) => {
    let node = root;
    const parts = name.split(".");
    parts.forEach((part, at) => {
      const key = at === parts.length - 1 ? `\0${part}` : part;
      if (!node.children.has(key)) node.children.set(key, { label: part, children: new Map(), leaf: -1, open: false });
      node = node.children.get(key);
    });
    node.leaf = p;
  });
  const settle = (node) => {
    node.kids = [...node.children.values()];
    node.kids.forEach(settle);
    node.kids = node.kids.map((kid) => (kid.leaf < 0 && kid.kids.length === 1
      ? { ...kid.kids[0], label: `${kid.label}.${kid.kids[0].label}` } : kid));
    node.all = node.leaf >= 0 ? [node.leaf] : node.kids.flatMap((kid) => kid.all);
    node.size = node.all.reduce((sum, p) => sum + (sizeOf(p) || 0), 0);
    node.kids.sort((a, b) => collator.compare(a.label, b.label));
  };
  settle(root);
  root.kids.forEach((kid) => { kid.open = names.length <= 60 || root.kids.length === 1; });

  const view = { words: [], by: 0, descending: false, rows: [], chosen: -1 };
  const VALUES = [null, (p) => typeOf(p)[DTYPE], (p) => typeOf(p)[SHAPES][0].join(","), (p) => sizeOf(p) || 0, cutsOf, (p) => typeOf(p)[KIND]];
  const detail = el("div", { id: "detail", "aria-live": "off" }, el("p", { class: "soft" }, "Select a parameter to see its slices."));
  const status = el("span", { class: "soft", role: "status", id: "matches" });
  const list = new List("Parameters", [
    { title: "name", width: "minmax(150px,3fr)" },
    { title: "type", width: "minmax(70px,.7fr)", wide: true },
    { title: "shape", width: "minmax(90px,1fr)", wide: true },
    { title: "size", width: "94px", numeric: true },
    { title: "layout", width: "minmax(110px,1.2fr)" },
    { title: "kind", width: "minmax(70px,.8fr)", wide: true },
  ], {
    tree: true,
    onsort: (at) => { view.descending = view.by === at ? !view.descending : at === 3; view.by = at; refresh(); },
    onpick: (at) => { const row = view.rows[at]; if (row.leaf >= 0) show(row.leaf); },
    onfold: (at) => { const { node } = view.rows[at]; node.open = !node.open; refresh(); },
  });
  function refresh() {
    const lower = view.words;
    const hit = lower.length ? names.map((name, p) => lower.every((word) => name.toLowerCase().includes(word) || shown[p].toLowerCase().includes(word))) : null;
    const rows = [];
    if (view.by === 0) {
      const walk = (node, level) => {
        const kids = view.descending ? [...node.kids].reverse() : node.kids;
        for (const kid of kids) {
          const inside = hit ? kid.all.filter((p) => hit[p]) : kid.all;
          if (!inside.length) continue;
          rows.push({ node: kid, leaf: kid.leaf, level, count: inside.length });
          if (kid.leaf < 0 && (hit || kid.open)) walk(kid, level + 1);
        }
      };
      walk(root, 1);
    } else {
      const value = VALUES[view.by];
      const order = names.map((_, p) => p).filter((p) => !hit || hit[p]);
      const sign = view.descending ? -1 : 1;
      order.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        return sign * (typeof x === "number" ? x - y : collator.compare(x, y)) || collator.compare(names[a], names[b]);
      });
      for (const leaf of order) rows.push({ leaf, level: 1, count: 1 });
    }
    const kept = view.rows[list.active];
    view.rows = rows;
    const matches = hit ? hit.filter(Boolean).length : names.length;
    status.textContent = hit ? `${plain(matches)} of ${plural(names.length, "parameter")}` : plural(names.length, "parameter");
    list.active = rows.findIndex((row) => (kept ? row.leaf === kept.leaf && row.node === kept.node : row.leaf >= 0 && row.leaf === view.chosen));
    list.sorted(view.by, view.descending);
    list.show(rows.length, (at) => {
      const { leaf, node, count } = rows[at];
      if (leaf < 0) return [
        el("span", {}, el("span", { class: "twist", "aria-hidden": "true" }, hit || node.open ? "▾" : "▸"), clean(node.label) || '""', el("span", { class: "count" }, plain(count))),
        "", "", bytes(node.size), "", ""];
      const type = typeOf(leaf);
      return [node ? el("span", {}, el("span", { class: "twist" }), clean(node.label) || '""') : shown[leaf], type[DTYPE],
        type[SHAPES].map(shape).join(" "), bytes(sizeOf(leaf)), cutsOf(leaf), type[KIND]];
    }, (at) => ({ level: rows[at].level, expanded: rows[at].leaf < 0 ? Boolean(hit || rows[at].node.open) : undefined, title: rows[at].leaf >= 0 ? shown[rows[at].leaf] : undefined }));
  }
  const search = el("input", {
    type: "search", id: "search", placeholder: "Search names, e.g. layers.0 weight", "aria-label": "Search parameters", autocomplete: "off",
    oninput: (event) => { view.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean); list.host.scrollTop = 0; refresh(); },
    onkeydown: (event) => { if (event.key === "ArrowDown") { list.host.focus(); list.pick(Math.max(0, list.active)); event.preventDefault(); } },
  });

  // One parameter.
  const table = (columns, rows) => el("div", { class: "scroll", tabindex: 0 }, el("table", {},
    el("thead", {}, el("tr", {}, ...columns.map(([title, numeric]) => el("th", { class: numeric ? "n" : "", scope: "col" }, title)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, n) => el("td", { class: columns[n][1] ? "n" : "" }, el("span", { class: "text" }, cell))))))));
  const facts = (pairs) => el("dl", {}, ...pairs.filter(([, value]) => value).flatMap(([term, value]) => [el("dt", {}, term), el("dd", { class: "text" }, value)]));

  function show(p) {
    view.chosen = p;
    const type = typeOf(p), layout = layoutOf(p);
    const parts = [
      el("h3", { class: "text", id: "chosen" }, shown[p]),
      facts([
        ["type", type[DTYPE]], [layout ? "full shape" : "shape in files", type[SHAPES].map(shape).join(", ")],
        [layout ? "full size" : null, layout ? `${bytes(type[BYTES])} (${plain(type[BYTES])} bytes)` : ""],
        ["in files", `${bytes(type[STORED])} in ${plural(type[FILES], "file")}`], ["kind", type[KIND]], ["layout", layout ? layout.words || cutsOf(p) : "none known: copied as it is stored"],
      ].filter(([term]) => term)),
    ];
    const row = statistics.get(p);
    if (row) parts.push(facts(statisticsFacts(row)));
    if (layout) layout.shardings.forEach((sharding, at) => parts.push(slicesOf(p, sharding, type[SHAPES][0], at, layout.shardings.length)));
    detail.replaceChildren(...parts);
  }

  function slicesOf(p, sharding, dims, way, ways) {
    const slices = allHolders(sharding), count = slices.length;
    const cut = sharding.cuts.map((n, d) => [n, d]).filter(([n]) => n > 1).map(([, d]) => d);
    let across = cut.length && (cut.length > 1 || cut[0] !== 0) ? sharding.cuts[cut[cut.length - 1]] : 1;
    let down = count / across;
    const wrapped = down > 160 || across > 160;
    if (wrapped) { across *= Math.max(1, Math.round(Math.sqrt(down / across))); if (across > 160) across = 64; down = Math.ceil(count / across); }
    const axis = cut.length ? (wrapped ? "Slices in order, row by row." : [
      cut.length > 1 || cut[0] === 0 ? `down: dimension ${cut.length > 1 ? cut.slice(0, -1).join(", ") : cut[0]}` : "",
      cut.length > 1 || cut[0] !== 0 ? `across: dimension ${cut[cut.length - 1]}` : ""].filter(Boolean).join("; ") + ".") : "";
    const states = slices.map((_, slice) => stateOf(sharding, slice));
    const tally = (name) => states.filter((each) => each === name).length;
    const copies = copiesOf(sharding);
    const words = `${count === 1 ? "One slice" : `${plain(count)} slices`}, ${copies > 1 ? `each on ${plural(copies, unit)}: replicas` : `each on one ${unit}`}.`;
    const output = el("output", { class: "box", "aria-live": "polite" });
    const holders = el("div", { class: "holders" });
    const canvas = el("canvas", {
      class: "slices", tabindex: 0, role: "application", "aria-roledescription": "grid of slices",
      "aria-label": `Slices of ${shown[p]}: ${words} Arrow keys move between slices.`,
      onpointermove: (event) => { const slice = under(event); if (slice !== null) choose(slice); },
      onpointerdown: (event) => { const slice = under(event); if (slice !== null) choose(slice); },
      onkeydown: (event) => {
        const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, ArrowDown: chosen + across, ArrowUp: chosen - across, Home: 0, End: count - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        if (to >= 0 && to < count) choose(to);
      },
      onfocus: () => choose(chosen),
    });
    let chosen = 0, cellWidth = 1, cellHeight = 1;
    const under = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left - 1) / cellWidth), line = Math.floor((event.clientY - box.top - 1) / cellHeight);
      const slice = line * across + column;
      return column >= 0 && column < across && line >= 0 && slice < count ? slice : null;
    };
    const draw = () => {
      const width = Math.max(60, Math.min(canvas.parentElement ? canvas.parentElement.clientWidth - 2 : 400, 680, across * 130));
      cellWidth = width / across;
      cellHeight = Math.max(2, Math.min(34, 440 / down));
      const context = sized(canvas, width, cellHeight * down);
      const fills = { held: colour("held"), part: colour("part"), lost: colour("lost") };
      const gap = Math.min(cellWidth, cellHeight) > 8 ? 1 : 0;
      context.font = "12px system-ui, sans-serif";
      context.textBaseline = "middle";
      context.textAlign = "center";
      for (let slice = 0; slice < count; slice++) {
        const x = (slice % across) * cellWidth, y = Math.floor(slice / across) * cellHeight;
        context.fillStyle = fills[states[slice]];
        context.fillRect(x, y, cellWidth - gap, cellHeight - gap);
        if (cellHeight >= 15 && cellWidth >= 26) {
          const text = (states[slice] === "lost" ? "lost " : "") + ranges(fileNumbers(slices[slice]), 4);
          for (const said of [text, `${fileNumber(slices[slice][0])}${slices[slice].length > 1 ? ",…" : ""}`]) {
            if (context.measureText(said).width + 6 <= cellWidth) {
              context.fillStyle = colour("ink");
              context.fillText(said, x + cellWidth / 2, y + cellHeight / 2);
              break;
            }
          }
        }
      }
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect((chosen % across) * cellWidth + 1, Math.floor(chosen / across) * cellHeight + 1, Math.max(1, cellWidth - 2 - gap), Math.max(1, cellHeight - 2 - gap));
    };
    const choose = (slice) => {
      chosen = slice;
      const held = slices[slice];
      const volume = boxOf(sharding, dims, slice).reduce((product, [start, stop]) => product * (stop - start), 1);
      const item = typeOf(p)[BYTES] / dims.reduce((product, size) => product * size, 1);
      const lacking = held.filter((file) => sharding.lacking.has(file));
      output.textContent = `slice ${slice} of ${count}: box ${boxText(boxOf(sharding, dims, slice))} on ${counted(unit, fileNumbers(held))}`
        + (lacking.length ? `; not in the files of ${counted(unit, fileNumbers(lacking))}` : "") + (states[slice] === "lost" ? "; LOST" : "");
      holders.replaceChildren(table([[counter, true], ["file", false], ["offset", true], ["bytes", true]], held.slice(0, MAX_LISTED).map((file) => {
        const place = sharding.lacking.has(file) ? null : placeIn(file, p);
        const path = pathOf(file);
        // A chunk of the file may be more than this slice.
        const chunk = place && place[1] !== volume * item ? "in a chunk at " : "";
        return [String(fileNumber(file)), path === null ? "missing" : clean(path), place ? chunk + plain(place[0]) : sharding.lacking.has(file) ? "not in it" : "-", place ? plain(place[1]) : "-"];
      })), held.length > MAX_LISTED ? el("p", { class: "soft" }, `and ${plural(held.length - MAX_LISTED, "more " + unit)}`) : "");
      draw();
    };
    const host = el("div", {},
      ways > 1 ? el("h3", {}, `Held in ${ways} ways: ${way + 1} of ${ways}`) : null,
      el("p", {}, words, " ", el("span", { class: "soft" }, axis)), canvas,
      el("div", { class: "legend" }, ...[["held", "on all its holders"], ["part", "missing on some, a replica has it"], ["lost", "lost: on no readable file"]]
        .filter(([name]) => tally(name) || name === "held").map(([name, said]) => el("span", {}, el("i", { class: name }), `${said}: ${plain(tally(name))}`))),
      output, holders);
    redraws.length = way ? redraws.length : 1;
    redraws.push(draw);
    queueMicrotask(() => { const lost = states.indexOf("lost"); choose(lost >= 0 ? lost : 0); });
    return host;
  }

  // Statistics.
  const statistics = new Map();
  const STATISTICS = ["elements", "NaN", "Inf", "zeros", "min", "max", "mean", "norm"];
  const short = (value) => (value === null ? "-" : typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value));
  const where = (found) => `[${found.index.join(", ")}]` + (found.file === null ? "" : `, ${unit} ${found.rank}, ${clean(found.file)}`);
  const BARS = " ▁▂▃▄▅▆▇█";
  const bars = (levels) => (levels ? [...levels[1]].map((digit) => BARS[digit]).join("") : "");
  const statisticsFacts = (row) => [
    ...STATISTICS.map((title, at) => [title, short(row[at + 1])]),
    ["first NaN or Inf", row[9] ? where(row[9]) : ""],
    ["magnitudes", row[10] ? `2^${row[10][0]} ${bars(row[10])} 2^${row[10][0] + row[10][1].length - 1}` : ""],
  ];
  const indexOf = new Map(names.map((name, p) => [name, p]));
  let statisticsSection = null;
  if (data.statistics) {
    data.statistics.forEach((row) => { if (indexOf.has(row[0])) statistics.set(indexOf.get(row[0]), row); });
    const rows = [...data.statistics];
    let by = -1, descending = true;
    const bad = rows.filter((row) => row[9]);
    const order = () => {
      const key = by <= 0 ? null : by;
      rows.sort((a, b) => (by < 0 ? Boolean(b[9]) - Boolean(a[9]) || (b[2] + b[3]) - (a[2] + a[3]) : 0)
        || (key ? (descending ? -1 : 1) * ((typeof a[key] === "number" ? a[key] : -Infinity) - (typeof b[key] === "number" ? b[key] : -Infinity) || 0) : 0)
        || (by === 0 && descending ? -1 : 1) * collator.compare(a[0], b[0]));
      if (by >= 0) found.sorted(by, descending);
      found.show(rows.length, (at) => {
        const row = rows[at];
        return [el("span", { class: row[9] ? "bad" : "" }, (row[9] ? "! " : "") + clean(row[0])), ...row.slice(1, 9).map(short), bars(row[10])];
      }, (at) => ({ title: clean(rows[at][0]) }));
    };
    const found = new List("Statistics", [
      { title: "name", width: "minmax(140px,2.4fr)" }, { title: "elements", width: "minmax(74px,.8fr)", numeric: true, wide: true },
      { title: "NaN", width: "minmax(52px,.5fr)", numeric: true }, { title: "Inf", width: "minmax(52px,.5fr)", numeric: true },
      ...["zeros", "min", "max", "mean", "norm"].map((title) => ({ title, width: "minmax(74px,.8fr)", numeric: true, wide: true })),
      { title: "magnitudes", width: "minmax(110px,1.5fr)", mono: true, sort: false },
    ], {
      height: 380,
      onsort: (at) => { descending = by === at ? !descending : at > 0; by = at; order(); },
      onpick: (at) => { const p = indexOf.get(rows[at][0]); if (p !== undefined) show(p); },
    });
    order();
    statisticsSection = el("section", { id: "statistics" }, el("h2", {}, "Statistics"),
      el("p", { class: bad.length ? "bad" : "" }, bad.length ? `${plural(bad.length, "tensor")} with NaN or Inf` : "No NaN and no Inf."),
      bad.length ? el("ul", {}, ...bad.slice(0, 20).map((row) => el("li", { class: "text" }, `${clean(row[0])}: ${plain(row[2])} NaN, ${plain(row[3])} Inf; the first at ${where(row[9])}`))) : null,
      el("p", { class: "soft" }, "Magnitudes: how many elements there are of each power of two, from the smallest to the largest; NaN, Inf and zeros are left out."),
      found.host);
  }

  // Files and steps.
  const fileList = new List("Files", [
    { title: counter, width: "80px", numeric: true }, { title: "file", width: "minmax(80px,3fr)" },
    { title: "size", width: "94px", numeric: true }, { title: "state", width: "74px" }, { title: "same slices as", width: "140px", wide: true },
  ], { height: 340 });
  const fileOrder = files.number.map((_, at) => at).sort((a, b) => (files.state[b] !== "ok") - (files.state[a] !== "ok") || a - b);
  const groups = new Set(files.same.filter((each) => each !== null)).size;
  const filesSection = el("section", { id: "files" }, el("h2", {}, "Files and steps"),
    data.steps.length ? table([["step", false], ["size", true], ["state", false], ["on this page", false]], data.steps.slice(0, MAX_LISTED).map((step) => [
      step.step === null ? "no step in the names" : clean(step.step), bytes(step.nbytes), step.state, step.shown ? "yes" : ""])) : "",
    el("p", {}, `${plural(files.number.length, unit)}, below `, el("span", { class: "text" }, clean(data.files.base)),
      files.same.some((each) => each !== null) ? groups < files.number.length ? `; ${plural(groups, "group")} of ${unit}s with equal slices` : `; no two ${unit}s hold the same slices` : ""),
    fileList.host);
  fileList.show(fileOrder.length, (row) => {
    const at = fileOrder[row];
    return [files.number[at] === null ? "-" : String(files.number[at]), files.path[at] === null ? "none" : clean(files.path[at]), bytes(files.bytes[at]),
      el("span", { class: files.state[at] === "ok" ? "" : "bad" }, files.state[at]),
      files.same[at] === null || files.same[at] === files.number[at] ? "" : `${unit} ${files.same[at]}`];
  }, (row) => ({ title: files.path[fileOrder[row]] === null ? undefined : clean(files.path[fileOrder[row]]) }));

  const movesSection = data.moves ? conversion(data.moves) : null;
  function conversion(moves) {
    const { together } = moves;
    const rows = Math.ceil(moves.sources / together), columns = Math.ceil(moves.targets / together);
    const relations = ["parameters", "copied"].map((key) => ({ first: moves[key].first, pattern: repeated(moves[key].pattern) }));
    const each = (relation, target, take) => {
      const number = relation.pattern[target];
      if (number < 0) return;
      const pattern = moves.patterns[number];
      let source = relation.first[target];
      take(source, ...moves.values[pattern[0]]);
      for (let at = 1; at < pattern.length; at += 2) take(source += pattern[at], ...moves.values[pattern[at + 1]]);
    };
    const sizes = repeated(moves.bytes);
    const span = (noun, first, last, count) => {
      const low = first * together, high = Math.min(count, (last + 1) * together) - 1;
      return low === high ? `${noun} ${low}` : `${noun}s ${low}-${high}`;
    };
    const windowed = { top: 0, bottom: rows, left: 0, right: columns };
    let cursor = [0, 0], bins = null, target = 0;
    const output = el("output", { id: "cell", "aria-live": "polite" });
    const canvas = el("canvas", {
      id: "matrix", tabindex: 0, role: "application", "aria-roledescription": "matrix",
      "aria-label": `Bytes from ${plural(moves.sources, "source " + moves.source_noun)}, down, to ${plural(moves.targets, "target " + moves.target_noun)}, across. Arrow keys move, plus and minus zoom, Enter selects the target.`,
      onpointermove: (event) => point(event), onclick: (event) => { point(event); pick(); },
      onwheel: (event) => { if (document.activeElement === canvas) { event.preventDefault(); point(event); zoom(event.deltaY < 0 ? 0.5 : 2); } },
      onkeydown: (event) => {
        const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
        if (step) move(cursor[0] + step[0], cursor[1] + step[1]);
        else if (event.key === "+" || event.key === "=") zoom(0.5);
        else if (event.key === "-") zoom(2);
        else if (event.key === "0") reset();
        else if (event.key === "Enter" || event.key === " ") pick();
        else return;
        event.preventDefault();
      },
    });
    const draw = () => {
      const width = Math.max(200, Math.min(700, (canvas.parentElement ? canvas.parentElement.clientWidth : 640) - 2));
      const wide = windowed.right - windowed.left, high = windowed.bottom - windowed.top;
      const nx = Math.min(wide, Math.floor(width / 2)), ny = Math.min(high, 240);
      const height = Math.min(480, Math.max(ny * 2, Math.min(ny * 30, 480)));
      const context = sized(canvas, width, height);
      const size = new Float64Array(nx * ny), copied = new Float64Array(nx * ny), requests = new Float64Array(nx * ny);
      for (let at = windowed.left; at < windowed.right; at++) {
        const x = Math.floor((at - windowed.left) * nx / wide);
        relations.forEach((relation, copying) => each(relation, at, (source, taken, asked) => {
          if (source < windowed.top || source >= windowed.bottom) return;
          const bin = Math.floor((source - windowed.top) * ny / high) * nx + x;
          (copying ? copied : size)[bin] += taken;
          requests[bin] += asked;
        }));
      }
      const most = size.reduce((high, value) => Math.max(high, value), 0);
      const cellWidth = width / nx, cellHeight = height / ny, gap = Math.min(cellWidth, cellHeight) > 5 ? 1 : 0;
      const heat = colour("heat");
      context.fillStyle = colour("panel");
      context.fillRect(0, 0, width, height);
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let y = 0; y < ny; y++) for (let x = 0; x < nx; x++) {
        const bin = y * nx + x;
        if (!size[bin] && !copied[bin]) continue;
        const strong = size[bin] ? 0.15 + 0.85 * size[bin] / most : 0;
        context.fillStyle = size[bin] ? `rgba(${heat},${strong})` : colour("copied");
        context.fillRect(x * cellWidth, y * cellHeight, cellWidth - gap, cellHeight - gap);
        if (cellWidth >= 56 && cellHeight >= 15) {
          context.fillStyle = strong > 0.55 ? colour("page") : colour("ink");
          context.fillText(bytes(size[bin] + copied[bin]), (x + 0.5) * cellWidth, (y + 0.5) * cellHeight);
        }
      }
      bins = { nx, ny, wide, high, size, copied, requests, cellWidth, cellHeight, most };
      cursor = [Math.min(cursor[0], ny - 1), Math.min(cursor[1], nx - 1)];
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(cursor[1] * cellWidth, cursor[0] * cellHeight, Math.max(2, cellWidth - gap), Math.max(2, cellHeight - gap));
      scale.textContent = `strongest: ${bytes(most)}`;
      windowText.textContent = `${span("source " + moves.source_noun, windowed.top, windowed.bottom - 1, moves.sources)} by ${span("target " + moves.target_noun, windowed.left, windowed.right - 1, moves.targets)}`
        + (nx < wide || ny < high || together > 1 ? "; neighbours are added up" : "");
    };
    const edge = (at, bin, count, size) => at + Math.ceil(bin * size / count);
    const spanOf = ([y, x]) => [edge(windowed.top, y, bins.ny, bins.high), edge(windowed.top, y + 1, bins.ny, bins.high) - 1, edge(windowed.left, x, bins.nx, bins.wide), edge(windowed.left, x + 1, bins.nx, bins.wide) - 1];
    const tell = () => {
      const [top, bottom, left, right] = spanOf(cursor);
      const bin = cursor[0] * bins.nx + cursor[1], copied = bins.copied[bin];
      output.textContent = `source ${span(moves.source_noun, top, bottom, moves.sources)} to target ${span(moves.target_noun, left, right, moves.targets)}: `
        + `${plain(bins.size[bin] + copied)} bytes in ${plural(bins.requests[bin], "request")}` + (copied ? `, ${plain(copied)} of them values copied as they are` : "");
    };
    const move = (y, x) => {
      cursor = [Math.max(0, Math.min(bins.ny - 1, y)), Math.max(0, Math.min(bins.nx - 1, x))];
      draw();
      tell();
    };
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      move(Math.floor((event.clientY - box.top - 1) / bins.cellHeight), Math.floor((event.clientX - box.left - 1) / bins.cellWidth));
    };
    const zoom = (factor) => {
      const [top, bottom, left, right] = spanOf(cursor);
      const part = (low, high, middle, count) => {
        const size = Math.max(1, Math.min(count, Math.round((high - low) * factor)));
        const start = Math.max(0, Math.min(count - size, Math.round(middle - size / 2)));
        return [start, start + size];
      };
      [windowed.top, windowed.bottom] = part(windowed.top, windowed.bottom, (top + bottom + 1) / 2, rows);
      [windowed.left, windowed.right] = part(windowed.left, windowed.right, (left + right + 1) / 2, columns);
      const at = (middle, low, high, count) => Math.floor((middle - low) * count / (high - low));
      draw();
      move(at((top + bottom) / 2, windowed.top, windowed.bottom, bins.ny), at((left + right) / 2, windowed.left, windowed.right, bins.nx));
    };
    const reset = () => { Object.assign(windowed, { top: 0, bottom: rows, left: 0, right: columns }); draw(); tell(); };
    const pick = () => select(Math.min(moves.targets - 1, spanOf(cursor)[2] * together));
    const sources = new List("Sources of the target", [
      { title: `source ${moves.source_noun}`, width: "minmax(90px,1fr)", numeric: true }, { title: "bytes", width: "minmax(90px,1fr)", numeric: true },
      { title: "requests", width: "minmax(80px,1fr)", numeric: true }, { title: "size", width: "90px", numeric: true, wide: true },
    ], { height: 360 });
    const chosen = el("p", { id: "target", role: "status" });
    const input = el("input", { type: "number", id: "targetnumber", min: 0, max: moves.targets - 1, value: 0, oninput: () => { const value = Number(input.value); if (Number.isInteger(value) && value >= 0 && value < moves.targets) select(value); } });
    const select = (number) => {
      target = number;
      if (document.activeElement !== input) input.value = number;
      const found = new Map();
      relations.forEach((relation) => each(relation, Math.floor(number / together), (source, taken, asked) => {
        const before = found.get(source) || [0, 0];
        found.set(source, [before[0] + taken, before[1] + asked]);
      }));
      const order = [...found].sort((a, b) => a[0] - b[0]);
      const sum = order.reduce((all, [, [taken, asked]]) => [all[0] + taken, all[1] + asked], [0, 0]);
      chosen.textContent = `Target ${span(moves.target_noun, Math.floor(number / together), Math.floor(number / together), moves.targets)}: `
        + `${plain(sum[0])} bytes from ${plural(order.length, `source ${moves.source_noun}`)} in ${plural(sum[1], "request")}`
        + (together > 1 ? ` (${together} neighbours are added up)` : `; its file has ${plain(sizes[number])} bytes`);
      sources.active = -1;
      sources.show(order.length, (at) => {
        const [source, [taken, asked]] = order[at];
        return [together > 1 ? span("", source, source, moves.sources).trim() : String(source), plain(taken), plain(asked), bytes(taken)];
      });
    };
    const scale = el("span", {}), windowText = el("p", { class: "soft" });
    redraws.push(draw);
    queueMicrotask(() => { draw(); tell(); select(0); });
    return el("section", { id: "conversion" }, el("h2", {}, "Conversion"),
      el("p", {}, "To ", el("span", { class: "text" }, clean(moves.strategy || "")), `: ${bytes(moves.taken)} from ${plural(moves.sources, "source " + moves.source_noun)} to ${plural(moves.targets, "target " + moves.target_noun)} in ${plural(moves.requests, "request")}`
        + (moves.copied_bytes ? `; ${bytes(moves.copied_bytes)} of it are values copied as they are.` : ".")),
      el("p", { class: "soft" }, "A request is a range of a source file. Targets that one run writes together read common ranges once."),
      el("div", { class: "two" },
        el("div", {}, el("div", { class: "tools" }, el("button", { type: "button", onclick: () => zoom(0.5), "aria-label": "Zoom in" }, "+"),
          el("button", { type: "button", onclick: () => zoom(2), "aria-label": "Zoom out" }, "−"), el("button", { type: "button", onclick: reset }, "Whole matrix")),
        windowText, canvas, el("div", { class: "legend" }, el("span", {}, el("i", { class: "heat" }), scale), moves.copied_bytes ? el("span", {}, el("i", { class: "copied" }), "values only") : ""), output),
        el("div", {}, el("div", { class: "tools" }, el("label", { for: "targetnumber" }, `Target ${moves.target_noun}`), input), chosen, sources.host)));
  }

  const sections = [problems,
    el("section", { id: "parameters" }, el("h2", {}, "Parameters"), el("div", { class: "tools" }, search, status), el("div", { class: "two" }, list.host, detail)),
    movesSection, statisticsSection, filesSection].filter(Boolean);
  // Numbers that are not finite are what people look for first.
  if (statisticsSection && data.statistics.some((row) => row[9])) sections.splice(1, 0, ...sections.splice(sections.indexOf(statisticsSection), 1));
  document.body.append(
    el("header", {}, el("h1", { class: "text" }, clean(data.source)), el("p", { class: "soft", id: "summary" }, summary)),
    el("nav", { "aria-label": "Sections" }, el("ul", {}, ...sections.map((section) => el("li", {}, el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent))))),
    el("main", {}, ...sections),
    el("footer", {}, `reshard view ${data.version}. Sizes are binary: 1 KiB is 1024 bytes.`));
  if (!movesSection) redraws.push(() => {});
  refresh();
  const firstLost = names.findIndex((_, p) => { const layout = layoutOf(p); return layout && layout.shardings.every((sharding) => sharding.absent.length && allHolders(sharding).some((_, slice) => stateOf(sharding, slice) === "lost")); });
  const first = firstLost >= 0 ? firstLost : Math.max(names.findIndex((_, p) => layoutOf(p)), names.findIndex((_, p) => layoutOf(p) && typeOf(p)[KIND] === "weights"));
  if (first >= 0) show(first);
  const again = () => redraws.forEach((redraw) => redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", again);
  requestAnimationFrame(() => { document.body.dataset.drawn = Math.round(performance.now() - started); });
})();
