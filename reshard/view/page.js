"use strict";
(() => {
  const started = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const { compared, unit, cluster, structures } = data;
  const ROW = 28;
  const MOST_ROWS = 500000;

  // Texts. Names come from files of others: they become text nodes only, and marks that change how text reads are shown.
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const clean = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  const lines = (text) => text.split("\n").map(clean).join("\n");
  const shortened = (text, most = 400) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(-most / 2)}` : text);

  // Elements: a tag with classes, then attributes and children in any order.
  const SVG = new Set(["svg", "g", "rect", "path", "text"]);
  const set = (made, attributes) => {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key === "style") Object.assign(made.style, value);
      else if ((value ?? false) !== false) made.setAttribute(key, value);
    }
  };
  const el = (what, ...children) => {
    const [tag, ...classes] = what.split(".");
    const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    if (classes.length) made.setAttribute("class", classes.join(" "));
    for (const child of children.flat(Infinity)) {
      if (child?.constructor === Object) set(made, child);
      else if (child || child === 0) made.append(child);
    }
    return made;
  };
  const rect = (kind, x, y, width, height) => el(`rect.${kind}`, { x, y, width, height });
  const words = (kind, x, y, text) => el(`text.${kind}`, { x, y }, text);

  // Numbers.
  const format = new Intl.NumberFormat("en");
  const plain = (value) => format.format(value);
  const scaled = (size, base, units) => {
    let power = 0;
    while (size >= base && power < units.length - 1) { size /= base; power++; }
    return [power && size < 1000 ? size.toFixed(1) : plain(Math.round(size)), units[power]];
  };
  const byteUnits = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const binary = (size) => scaled(size, 1024, byteUnits);
  const thousands = (amount) => scaled(amount, 1000, ["", "k", "M", "B", "T"]);
  const bytes = (size) => binary(size).join(" ");
  const share = (part, whole) => {
    const percent = whole ? 100 * part / whole : 0;
    return percent && percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(1)} %`;
  };
  const fourDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const exact = (value) => (Number.isInteger(value) ? plain(value) : short(value));
  // At most four digits or six of an integer, so that a column has room.
  const short = (value) => {
    if (typeof value !== "number") return clean(value ?? "");
    const size = Math.abs(value);
    if (size < 1e6 && Number.isInteger(value)) return plain(value);
    return size < 1e-4 || size >= 1e4 ? Number(value.toPrecision(4)).toExponential() : fourDigits.format(value);
  };
  const plural = (amount, noun) => `${plain(amount)} ${noun}${amount === 1 ? "" : "s"}`;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const product = (values) => values.reduce((total, value) => total * value, 1);
  const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
  const between = (value, low, high) => Math.max(low, Math.min(high, value));
  const distinct = (values) => [...new Set(values)].sort((a, b) => a - b);
  // Amounts added up by key, in the order of keys.
  const addedUp = (items, keyOf, amountOf) => {
    const found = new Map();
    for (const item of items) found.set(keyOf(item), (found.get(keyOf(item)) || 0) + amountOf(item));
    return found;
  };
  const mostFirst = (found) => [...found].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const number = /^(0|[1-9]\d{0,14})$/;
  const extent = (first, last) => (first === last ? `${first}` : `${first}–${last}`);
  const ranges = (numbers, most = 12, dash = "–") => {
    const found = [];
    for (let at = 0; at < numbers.length;) {
      let end = at;
      while (numbers[end + 1] === numbers[end] + 1) end++;
      found.push(end === at ? numbers[at] : `${numbers[at]}${end - at > 1 ? dash : ","}${numbers[end]}`);
      at = end + 1;
    }
    return found.slice(0, most).join(",") + (found.length > most ? ` … (${plain(numbers.length)})` : "");
  };
  const shapeText = (dims) => `[${dims.join(", ")}]`;
  // Marks that a terminal obeys, and bytes that are no text, are typed as escapes.
  const escaped = (c) => { const code = c.charCodeAt(0); return code < 128 || code >= 0xdc80 && code < 0xdd00 ? `\\x${(code & 255).toString(16).padStart(2, "0")}` : clean(c); };
  const quote = (word) => {
    if (/^[\w@%+=:,./-]+$/.test(word)) return word;
    return word.search(HIDDEN) < 0 ? `'${word.replaceAll("'", "'\"'\"'")}'` : `$'${word.replace(/[\\']/g, "\\$&").replace(HIDDEN, escaped)}'`;
  };
  const breaks = (text) => text.split(/(?<=[._/])/).flatMap((part) => [part, el("wbr")]);
  // A text that is shortened in the middle where it has no room: two spans, the first with an ellipsis.
  const halves = (kind, text, end, shown = (part) => part, title = text) => el(`span.${kind}`, { title }, end > 0 && el("span.start", shown(text.slice(0, end))), el(end > 0 ? "span.end" : "span.start", shown(text.slice(Math.max(0, end)))));
  const pathText = (path) => halves("path", clean(path), clean(path).lastIndexOf("/", path.length - 12));
  const command = (texts) => {
    const code = el("code", texts.map((word) => [el("span.word", breaks(clean(word))), " "]));
    const copy = el("button.copy", {
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(texts.join(" "));
          copy.textContent = "Copied";
          setTimeout(() => { copy.textContent = "Copy"; }, 1200);
        } catch { getSelection().selectAllChildren(code); }
      },
    }, "Copy");
    return el("div.command", code, copy);
  };
  const numeric = (title) => (/^(name|file|result|type|shape.*|cut|step|state|)$/.test(title) ? "" : "n");
  const table = (columns, rows) => el("div.scroll", { tabindex: 0, role: "region", "aria-label": columns.join(", ") }, el("table",
    el("tr", columns.map((title) => el(`th.${numeric(title)}`, { scope: "col" }, title))), rows.map((cells) => el("tr", cells.map((cell, n) => el(`td.${numeric(columns[n])}`, cell))))));
  const fact = (label, value, small, soft, title) => el("div.fact", { title }, el("div.label", label), el("div.figure", value, small && el("span.unit", small)), el("div.soft", soft));

  // Keyboard; what is inside takes its own keys.
  const keysOf = (moves) => (event) => {
    if (!moves[event.key] || event.target !== event.currentTarget) return;
    event.preventDefault();
    moves[event.key](event);
  };
  // A picture of cells that the pointer and the arrow keys reach; the active one is outlined.
  const picture = (attributes, { go, hover = go, click = go, leave = () => {}, keys }) => {
    let cells = [], across = 1, active = 0, under = -1;
    const outline = rect("active", 0, 0, 0, 0);
    const mark = (at) => {
      active = at;
      const { x, y, width, height } = cells[at];
      set(outline, { x, y, width: Math.max(3, width), height: Math.max(3, height) });
    };
    const move = (at, event) => { mark(Math.min(at, cells.length - 1)); go(active, event); };
    const step = (right, down) => (event) => move(between(active % across + right, 0, across - 1) + between(Math.floor(active / across) + down, 0, Math.floor((cells.length - 1) / across)) * across, event);
    const pointed = (does) => (event) => {
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(host.getScreenCTM().inverse());
      const at = cells.findIndex((cell) => x >= cell.x && x < cell.x + cell.width && y >= cell.y && y < cell.y + cell.height);
      if (at >= 0 && (at !== under || event.type !== "pointermove")) does(at, event);
      under = at;
    };
    const host = el("svg", attributes, {
      tabindex: 0, role: "application", onpointerleave: () => { under = -1; leave(); }, onpointermove: pointed(hover), onpointerdown: pointed(hover), onclick: pointed((at, event) => { mark(at); click(at, event); }),
      onkeydown: keysOf({
        ArrowRight: step(1, 0), ArrowLeft: step(-1, 0), ArrowDown: step(0, 1), ArrowUp: step(0, -1), Home: (event) => move(0, event), End: (event) => move(cells.length - 1, event), Enter: (event) => click(active, event), ...keys,
      }),
    });
    const draw = (found, columns, [left, top, width, height], ...below) => {
      [cells, across] = [found, columns];
      set(host, { width, height, viewBox: `${left} ${top} ${width} ${height}` });
      host.replaceChildren(...below.flat(Infinity), ...cells.flatMap((cell, at) => {
        if (!cell.kind) return [];
        const { x, y, width, height, kind, low } = cell;
        cell.rect = rect(kind, x, low ? y + height * 0.35 : y, width, low ? height * 0.3 : height);
        set(cell.rect, { "data-at": at, rx: Math.min(width, height) > 5 ? 2 : 0 });
        return cell.text ? [cell.rect, words(`in.${kind}`, x + width / 2, y + height / 2 + 4, cell.text)] : [cell.rect];
      }), outline);
      return host;
    };
    return { host, draw, mark };
  };
  // A sentence on what the pointer or the keys are at, and another one otherwise.
  const teller = (resting) => {
    const said = el("span.soft", { role: "status" }, resting);
    return [said, (text = resting) => { said.textContent = text; }];
  };
  const redraws = [];
  let printing = false;
  // Rows exist only where they are seen, and some more; on paper the first 60.
  const drawRows = (host, body, total, rowAt) => {
    body.style.height = `${total * ROW}px`;
    const from = printing ? 0 : Math.max(0, Math.floor(host.scrollTop / ROW) - 8), to = printing ? 60 : Math.ceil((host.scrollTop + (host.clientHeight || 600)) / ROW) + 8;
    const rows = [];
    for (let at = from; at < Math.min(total, to); at++) rows.push(el("div.row", { role: "row", "aria-rowindex": at + 2, style: { top: `${at * ROW}px` } }, rowAt(at)));
    body.replaceChildren(...rows);
  };

  // Numbers in the few characters of reshard/view/page.py.
  const repeated = (found) => {
    const values = [];
    for (let at = 0; at < found.length; at += 2) for (let n = 0; n < found[at + 1]; n++) values.push(found[at]);
    return values;
  };

  // The tensors, in the natural order of their names.
  const parts = [];
  repeated(data.names.shared).forEach((shared, p) => parts.push([...(p ? parts[p - 1].slice(0, shared) : []), ...data.names.rest[p].split(".")]));
  const names = parts.map((each) => each.join("."));
  const count = names.length;
  const indexOf = new Map(names.map((name, p) => [name, p]));
  const types = data.types.map(([dtype, shapes, full, stored, held, kind]) => ({ dtype, shapes, full, held, kind, size: full ?? stored }));
  const typeOf = (p) => types[data.parameters.type[p]];
  const layoutOf = (p) => data.layouts[data.parameters.layout[p]];
  const filesOf = (found) => ({ ...found, bytes: repeated(found.bytes), state: repeated(found.state), same: repeated(found.same || []) });
  const files = filesOf(data.files);
  const present = files.state.filter((each) => each !== "missing").length;
  const fileAt = new Map(files.number.map((value, at) => [value, at]));
  // A file with several slices of a tensor has further numbers.
  const aliases = new Map(data.files.aliases);
  const fileNumber = (holder) => aliases.get(holder) ?? holder;
  const fileNumbers = (holders) => distinct(holders.map(fileNumber));
  const places = (numbers) => `${unit}${numbers.length === 1 ? "" : "s"} ${ranges(numbers)}`;
  const stages = cluster ? cluster.stages : [];
  const stageOf = (rank, of = stages) => of.findIndex(([first, devices]) => rank >= first && rank < first + devices);
  const stageText = (stage) => (stages.length > 1 && stages[stage] ? `${stage}, ranks ${extent(stages[stage][0], stages[stage][0] + stages[stage][1] - 1)}` : "");
  const axis = (name) => (cluster?.axes || []).find((each) => each[0] === name)?.[1] ?? 1;

  // Layouts: slices with their holders. Some look the same to a reader, as files may differ where ranks do not.
  const looks = new Map();
  for (const layout of data.layouts) {
    const seen = layout.shardings.map((sharding) => {
      const { slices, cuts } = sharding;
      sharding.lacking = new Set(sharding.absent);
      sharding.copies = largest(slices.map((each) => each.length));
      sharding.states = slices.map((each) => { const left = each.filter((file) => !sharding.lacking.has(file)).length; return !left ? "lost" : left < each.length ? "part" : "held"; });
      const cut = cuts.some((n) => n > 1) ? cuts.join(" × ") : unit === "rank" ? "whole" : "";
      layout.cut ??= [cut, sharding.copies > 1 && `${sharding.copies} copies`].filter(Boolean).join(", ");
      layout.stage = unit === "rank" ? stageOf(slices[0]?.[0]) : 0;
      layout.lost ||= sharding.states.includes("lost");
      return [cuts, sharding.copies, layout.stage, layout.lost, sharding.absent.length > 0];
    });
    const key = JSON.stringify(seen);
    if (!looks.has(key)) looks.set(key, looks.size);
    layout.look = looks.get(key);
  }

  // Places in files: per structure, from parameter to offset and size.
  const structureOf = new Map();
  structures?.files.forEach((found, at) => { for (const file of found) structureOf.set(file, at); });
  const read = new Map();
  const placesIn = (file) => {
    const at = structureOf.get(file);
    if (at === undefined || read.has(at)) return read.get(at);
    const found = new Map(), [gaps, sizes] = [repeated(structures.gaps[at]), repeated(structures.bytes[at])];
    let parameter = 0, end = 0;
    repeated(structures.parameters[at]).forEach((step, n) => { found.set(parameter += step, [end + gaps[n], sizes[n]]); end += gaps[n] + sizes[n]; });
    read.set(at, found);
    return found;
  };

  // Tensors of the same names but for numbers, and of the same type and look: what their names say they say once.
  const LAYER = new Set(["layers", "blocks", "h", "layer", "block"]);
  const SCALE = /(^|[._])(weight_scale_inv|weight_scale|weight_scales|input_scale|scales|scale_inv|scale|weight_shape|weight_zero_point)$/;
  const PARTS = [["scales", SCALE], ["experts", /experts?(\.|_|\b)/], ["router", /router|(^|\.)gate\.|gating/], ["norms", /norm|(^|\.)ln_/],
    ["embeddings", /embed|wte|wpe|tok_/], ["head", /(^|\.)(lm_head|head|output_layer)\./], ["attention", /att|(^|[._])(qkv|q_proj|k_proj|v_proj|o_proj|wq|wk|wv|wo)/],
    ["MLP", /mlp|ffn|feed_forward|(^|[._])(w1|w2|w3|fc1|fc2|gate_proj|up_proj|down_proj)/], ["other", /^/]];
  const KINDS = { "optimizer state": "moments", "accumulated gradients": "gradients", other: "other values" };
  const STATE = /^(adam_[mv]|moments?|moment[12]|accu_grads|accum|exp_avg|exp_avg_sq|fp32_param|optimizer\.state\.[a-z0-9_]+)\./;
  const result = compared && repeated(compared.result);
  const differing = new Map((compared?.differing || []).map((row) => [row[0], row]));
  const statistics = new Map((data.statistics || []).map((row) => [indexOf.get(row[0]), row]));
  // NaN or Inf, in a comparison in one only: what has it is apart from what is alike, and comes first.
  const isBad = (p) => { const row = statistics.get(p); return row ? row[2] + row[3] > 0 : Boolean(differing.get(p)?.[6]); };
  const series = new Map();
  const described = (p) => {
    const name = names[p], own = parts[p], { dtype, shapes, size, kind } = typeOf(p);
    const [part] = PARTS.find(([, pattern]) => pattern.test(name));
    const layerAt = own.findIndex((each, at) => LAYER.has(own[at - 1]) && number.test(each));
    // State of a layer belongs to the layer.
    const prefix = own.slice(0, Math.max(0, layerAt)).map((each) => (number.test(each) ? "*" : each)).join(".").replace(STATE, "");
    if (layerAt > 0 && !series.has(prefix)) series.set(prefix, { prefix, bytes: 0, layers: new Map() });
    // Packed types count their elements.
    const packed = name.endsWith("_packed") ? (dtype === "Int32" ? 8 : 2) : name.endsWith("_blocks") && dtype === "UInt8" ? 2 : 1;
    return {
      numbers: [], dtype: [dtype, compared?.types[p]].filter(Boolean).join(" → "), bad: isBad(p), part, layerAt, series: layerAt > 0 && series.get(prefix), size: size || 0, result: result ? result[p] : 0, cut: layoutOf(p)?.cut || "",
      kind: kind === "optimizer state" && /(^|\.)(fp32_param|master|optimizer\.state\.param)\b/.test(name) ? "masters" : KINDS[kind] || kind,
      elements: kind === "weights" && part !== "scales" && shapes.length ? product(shapes[0]) * packed : 0,
    };
  };
  const groupOf = [], byKey = new Map(), sizes = new Float64Array(count), layers = new Float64Array(count).fill(-1);
  // Without a layout, shapes are those of slices.
  const wholeShapes = types.every((type) => type.full !== null || type.kind !== "weights");
  const predicts = (layer) => data.prediction && layer >= data.prediction[0] && layer < data.prediction[0] + data.prediction[1];
  let parameters = 0, predicted = 0;
  for (let p = 0; p < count; p++) {
    const key = [parts[p].map((part) => (number.test(part) ? "\u0001" : part)).join("."), data.parameters.type[p], layoutOf(p)?.look, result?.[p], compared?.types[p], compared?.shapes[p], isBad(p)].join("\u0002");
    if (!byKey.has(key)) byKey.set(key, described(p));
    const group = groupOf[p] = byKey.get(key);
    group.numbers.push(p);
    sizes[p] = group.size;
    if (group.series) layers[p] = Number(parts[p][group.layerAt]);
    if (predicts(layers[p])) predicted += group.elements; else parameters += group.elements;
    if (!group.series || group.result > 2) continue;
    // Bytes of each layer.
    group.series.bytes += sizes[p];
    const all = group.series.layers, layer = all.get(layers[p]) || { layer: layers[p], bytes: 0, differ: 0, other: 0, tensors: 0, elements: 0, stage: layoutOf(p)?.stage ?? 0 };
    all.set(layers[p], layer);
    layer.bytes += sizes[p];
    layer.tensors++;
    layer.elements += group.elements;
    if (group.result) layer[group.result > 1 ? "other" : "differ"] += sizes[p];
  }
  const groups = [...byKey.values()], allBytes = sum(sizes);
  const bytesBy = (valueOf, of = groups) => addedUp(of, valueOf, (group) => group.size * group.numbers.length);
  const allSeries = [...series.values()].sort((a, b) => b.bytes - a.bytes);
  for (const each of allSeries) each.layers = [...each.layers.values()].sort((a, b) => a.layer - b.layer);
  const patternText = (found) => parts[found[0]].map((part, at) => {
    if (!number.test(part)) return clean(part);
    const numbers = distinct(found.map((p) => Number(parts[p][at])));
    return numbers.length > 1 ? `{${ranges(numbers, 8, "-")}}` : part;
  }).join(".");
  // What is wrong with a tensor: the worst comes first.
  const BAD = 9;
  const worst = (p) => { const { bad, result: code } = groupOf[p]; return bad ? BAD : code && (code === 1 ? 2 : 1) + (differing.get(p)?.[3] || 0); };

  // Filters: one byte a tensor and two prefix sums, so that any group is two subtractions.
  const filters = new Map(), listeners = [];
  const mask = new Uint8Array(count), counts = new Uint32Array(count + 1), totals = new Float64Array(count + 1);
  let searched = [], version = 0, lowered = null;
  const literally = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const plainWords = () => searched.filter((word) => !word.includes("*"));
  const apply = () => {
    version++;
    if (searched.length) lowered ||= names.map((name) => `${name}\n${name.search(HIDDEN) < 0 ? "" : clean(name)}`.toLowerCase());
    const texts = plainWords(), globs = searched.filter((word) => word.includes("*")).map((word) => new RegExp(`^${word.split("*").map(literally).join(".*")}$`, "m"));
    const tests = [...filters.values()].map((filter) => filter.test);
    for (let p = 0; p < count; p++) {
      mask[p] = texts.every((text) => lowered[p].includes(text)) && globs.every((glob) => glob.test(lowered[p])) && tests.every((test) => test(p));
      counts[p + 1] = counts[p] + mask[p];
      totals[p + 1] = totals[p] + mask[p] * sizes[p];
    }
    listeners.forEach((listener) => listener());
  };
  const filtered = () => searched.length > 0 || filters.size > 0;
  const toggle = (key, value, test) => {
    if (filters.get(key)?.value === value) filters.delete(key); else filters.set(key, { value, test });
    apply();
  };
  const clearAll = () => { filters.clear(); searched = []; search.value = ""; apply(); };
  // A button that filters; the others of its kind fade.
  const filterButton = (kind, key, value, test, ...inside) => el(`button${kind}`, { "data-filter": key, "data-value": value, onclick: () => toggle(key, value, test) }, ...inside);
  listeners.push(() => document.querySelectorAll("[data-filter]").forEach((each) => {
    const filter = filters.get(each.dataset.filter), on = filter?.value === each.dataset.value;
    each.setAttribute("aria-pressed", on);
    each.classList.toggle("faded", Boolean(filter) && !on);
  }));

  // Head and problems.
  const stateClass = { true: "ok", false: "bad" }[data.complete] || "";
  const side = (n) => el(`th.${"AB"[n]}`, { scope: "row" }, "AB"[n]);
  const sides = () => el("table.sides", compared.sides.map((each, n) => el("tr", side(n), el("td.mono", clean(each.path)), each.about.map((text) => el("td", clean(text))))));
  const header = el("header", el("h1", data.titles.map((title, n) => [n > 0 && el("span.and", " and "), breaks(clean(title))])), compared ? sides()
    : el("div.under", el("p", { id: "summary" }, data.about.map((text) => [clean(text), el("span.sep", "·")]), el(`span.state.${stateClass}`, el("i.dot"), clean(data.state))), el("p.mono", pathText(data.source))));
  const hint = (text) => {
    const [, before, typed] = text.match(/^(?:([^]*): )?(reshard [^]*)$/) || [null, text];
    return [before && el("p.text", before), typed && command([typed])];
  };
  const problem = (each) => el(`li.l${each.level}`, el("strong", ["Problem", "Not certain", "Note"][each.level]), el("span.text", lines(each.text)), each.hint && hint(lines(each.hint)));
  const problems = () => data.problems.length > 0 && el("section", { id: "problems", "aria-label": "Problems" }, el("ul.problems", data.problems.slice(0, 3).map(problem)),
    data.problems.length > 3 && el("details", el("summary", `and ${plain(data.problems.length - 3)} more`), el("ul.problems.rest", { tabindex: 0, "aria-label": "More problems" }, data.problems.slice(3).map(problem))));

  // Facts.
  const hasState = groups.some(({ kind }) => kind === "moments" || kind === "masters");
  const facts = () => {
    const [main] = allSeries, onDisk = sum(files.bytes), extra = main ? main.layers.filter(({ layer }) => predicts(layer)).length : 0;
    const [top, topBytes] = mostFirst(bytesBy(({ dtype }) => dtype))[0] || [];
    const weights = bytesBy(({ kind }) => kind).get("weights"), stageWords = stages.length > 1 && plural(stages.length, "stage");
    return el("div.facts", { id: "facts" },
      parameters > 0 && wholeShapes && fact("Parameters", ...thousands(parameters), predicted ? `+ ${thousands(predicted).join(" ")} in the prediction layer` : `${plain(parameters)} elements`, `${plain(parameters)} elements`),
      fact("On disk", ...binary(onDisk), `in ${plural(present, unit === "rank" ? "rank file" : "file")}`, `${plain(onDisk)} bytes`),
      fact("Tensors", plain(count), "", hasState ? `${plural(sum(groups.map((group) => group.kind === "weights" && group.numbers.length)), "weight")} and their state` : `${plural(groups.length, "pattern")} of names`),
      main && fact("Layers", extra ? `${main.layers.length - extra} + ${extra}` : plain(main.layers.length), "", extra ? "last: multi-token prediction" : stageWords || clean(shortened(main.prefix, 40))),
      cluster && fact("Ranks", plain(cluster.ranks), "", cluster.words || stageWords),
      hasState && weights ? fact("Weights", ...binary(weights), `${share(weights, allBytes)} of the bytes`, `${plain(weights)} bytes`)
        : topBytes > 0 && fact("Type", clean(top.replace(/Float(\d+).*/, "FP$1").replace("BFP", "BF")), "", `${share(topBytes, allBytes)} of the bytes`, clean(top)));
  };
  const differences = () => el("div.facts", { id: "facts" }, compared.results.map(([word, label], code) => {
    const found = groups.filter((group) => group.result === code), tensors = (of) => sum(of.map((group) => group.numbers.length));
    const labels = [...new Set(found.map((group) => (group.kind !== "weights" ? group.kind : group.series ? group.part : shortened(patternText(group.numbers), 30))))];
    const unread = code === 1 && !compared.values, same = code === 2 && compared.values && sum(found.flatMap(({ numbers }) => numbers).map((p) => differing.get(p)?.[2] === 0));
    const made = filterButton(".fact", "Result", word, (p) => groupOf[p].result === code, el("div.label", el(`i.key.r${code}`), label),
      el("div.figure", unread ? "unknown" : plain(tensors(found))), el("div.soft", unread ? "values were not compared: add --stats" : same ? `values equal in ${plain(same)}` : code ? labels.slice(0, 3).join(", ") + (labels.length > 3 ? " …" : "") || "none" : `of ${plural(tensors(groups.filter((group) => group.result < 3)), "tensor")} in both`));
    made.disabled = !found.length;
    return made;
  }));

  // What it is made of: stacked bars, each part a filter.
  const SHADES = ["b5", "b3", "b2", "b1", "grey"];
  const bar = (title, valueOf, order = []) => {
    const all = mostFirst(bytesBy(valueOf)).filter(([, size]) => size).sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]));
    if (all.length < 2 || all.some(([value, size]) => value === "other" && size > allBytes / 3)) return null;
    const small = all.filter(([, size], n) => n > 2 && (size < allBytes * 0.0005 || n > 4)), shown = all.filter((entry) => !small.includes(entry));
    const press = (kind, value, ...inside) => filterButton(kind, title, value, (p) => valueOf(groupOf[p]) === value, ...inside);
    return el("div.made", el("div.label", title), el("div",
      el("div.bar", shown.map(([value, size], n) => press(`.segment.${SHADES[n]}`, value, { tabindex: -1, title: `${clean(value)} ${bytes(size)}`, style: { flexGrow: size / allBytes } }))),
      el("div.legend", shown.map(([value, size], n) => press("", value, el(`i.key.${SHADES[n]}`), clean(value), el("span.soft", `${bytes(size)} · ${share(size, allBytes)}`))),
        small.length > 0 && el("span.soft", { title: small.map(([value, size]) => `${clean(value)} ${bytes(size)}`).join("\n") }, `${small.length} more`))));
  };
  const made = () => {
    const bars = [bar("Type", ({ dtype }) => dtype), bar("Kind", ({ kind }) => kind, ["weights", "masters", "moments", "gradients", "other values"]), bar("Part", ({ part }) => part), bar("Cut", (group) => group.cut || "whole")].filter(Boolean);
    return bars.length > 0 && el("div", el("h2", "What it is made of"), bars);
  };

  // How it is cut: a cell a rank, or a file.
  let fileCells = [];
  const outline = (numbers) => fileCells.forEach((cell) => cell.rect.classList.toggle("held", cell.numbers.some((each) => numbers.includes(each))));
  const cut = () => {
    const total = files.number.length, most = largest(files.bytes), ranked = cluster && unit === "rank" && cluster.ranks === total;
    const grid = (label, numbers, group, across, side, kindOf) => {
      const tall = side === 34 ? 28 : side, step = side > 8 ? 2 : 1, cells = [];
      for (let first = 0; first < numbers.length; first += group) {
        const inside = numbers.slice(first, first + group), found = inside.map((each) => fileAt.get(each)), at = cells.length, size = sum(found.map((each) => files.bytes[each]));
        const name = `${unit} ${extent(inside[0], inside[inside.length - 1])}`, lost = found.some((each) => files.state[each] !== "ok");
        cells.push({
          x: at % across * (side + step) + 0.5, y: Math.floor(at / across) * (tall + step) + 0.5, width: side - 1, height: tall - 1, kind: lost ? "lost" : kindOf(size), text: side === 34 && String(inside[0]), numbers: inside,
          name, said: `${name}: ${lost ? "missing or damaged" : `${group > 1 ? "" : `${clean(files.path[found[0]])}, `}${bytes(size)}`}`,
        });
      }
      fileCells = fileCells.concat(cells);
      const go = (at) => tell(cells[at].said);
      const click = (at) => {
        go(at);
        const { numbers: wanted, name } = cells[at], held = new Set([...structureOf.keys()].filter((holder) => wanted.includes(fileNumber(holder))).flatMap((holder) => [...placesIn(holder).keys()]));
        if (structureOf.size) toggle("file", name, (p) => held.has(p));
      };
      const { draw } = picture({ class: "cells", "aria-label": `${label}. Arrow keys move, Enter filters.` }, { go, click, leave: () => tell() });
      return draw(cells, across, [0, 0, across * (side + step) - step, Math.ceil(cells.length / across) * (tall + step)]);
    };
    let sentence, said, tell, blocks;
    if (ranked) {
      const group = cluster.ranks > 1024 ? 8 ** Math.ceil(Math.log(cluster.ranks / 1024) / Math.log(8)) : 1, side = cluster.ranks <= 64 ? 34 : 7, mp = axis("mp"), dp = axis("dp");
      let wide = group === 1 && mp > 1 ? mp : side === 34 ? 8 : 16;
      // A stage of hundreds of ranks is a block of its own, not a column.
      while (cluster.ranks / stages.length / group > wide * 20 && wide < 48) wide *= 2;
      blocks = () => stages.map(([first, devices], stage) => {
        const inside = allSeries.length > 0 && stages.length <= 8 ? allSeries[0].layers.filter((each) => each.stage === stage).map(({ layer }) => layer) : [], shade = stage % 2 ? "t" : "b";
        return el("div.block", stages.length > 1 && el("p.soft", el(`i.key.${shade}2`), `stage ${stage}${inside.length ? `: layers ${ranges(inside, 3)}` : ""}`),
          grid(`Ranks of stage ${stage}`, Array.from({ length: devices }, (_, n) => first + n), group, Math.min(wide, Math.ceil(devices / group)), side, () => `${shade}1`));
      });
      const copiesOf = (kind) => { const [best] = mostFirst(bytesBy((each) => each, groups.filter((each) => each.kind === kind && each.cut))); return best && layoutOf(best[0].numbers[0]).shardings[0].copies; };
      const weights = copiesOf("weights"), moments = copiesOf("moments");
      sentence = [group > 1 ? `One cell is ${group} ranks.` : `One cell is a rank${mp === 1 ? "" : wide > mp ? `, mp ${mp} side by side` : `: mp ${mp} across${dp > 1 ? `, dp ${dp} down` : ""}`}.`,
        weights > 1 ? `Weights: ${weights} copies${dp === weights ? " on dp" : ""}.` : weights && "Weights: each slice once.", moments < weights && `Moments: each of these slices cut in ${weights / moments} over dp.`, "Outlined: holders of the selected slice."];
    } else {
      const numbers = files.number.filter((each) => each !== null), group = Math.ceil(total / 600), least = Math.min(...files.bytes.filter((_, at) => files.state[at] === "ok"));
      if (!numbers.length) return null;
      blocks = () => grid(`Files${group > 1 ? `, ${group} a cell` : ""}`, numbers, group, Math.min(48, Math.ceil(numbers.length / group)), 14, (size) => (size < most * group / 2 ? "b1" : "b2"));
      sentence = [data.layouts.length > 0 && data.layouts.every((layout) => layout.shardings[0].cuts.every((n) => n === 1)) && "Tensors are whole.", total > 1 && least < Infinity && `The largest file has ${bytes(most)}, the smallest ${bytes(least)}.`];
    }
    [said, tell] = teller(sentence.filter(Boolean).join(" "));
    return el("div", { id: "cut" }, el("h2", ranked ? "How it is cut" : `Stored in ${plural(present, "file")}`), el(`div.blocks.${stages.length > 8 ? "many" : ""}`, blocks()), el("p", said));
  };

  // Layers: bytes of each.
  const strip = (each) => {
    const { prefix } = each, group = Math.ceil(each.layers.length / 200), layersOf = [];
    for (let at = 0; at < each.layers.length; at += group) {
      const inside = each.layers.slice(at, at + group), total = (key) => sum(inside.map((layer) => layer[key]));
      layersOf.push({ first: inside[0].layer, last: inside[inside.length - 1].layer, stage: inside[0].stage, bytes: total("bytes"), differ: total("differ"), other: total("other"), tensors: total("tensors"), elements: total("elements") });
    }
    const high = largest(layersOf.map((layer) => layer.bytes)), usual = layersOf.map((layer) => layer.bytes).sort((a, b) => a - b)[layersOf.length >> 1];
    const [said, tell] = teller(compared ? "" : `most layers ${bytes(usual)}; outside the layers ${bytes(sum(groups.map((found) => (found.series ? 0 : found.size * found.numbers.length))))}`);
    const text = (from, to) => `layer${from === to ? "" : "s"} ${extent(from, to)}`;
    let anchor = 0, pressed = 0, low = 0, top = 0;
    const choose = (from, to, again) => {
      low = layersOf[Math.min(from, to)].first;
      top = layersOf[Math.max(from, to)].last;
      const value = text(low, top), [least, most] = [low, top];
      if (again || filters.get(prefix)?.value !== value) toggle(prefix, value, (p) => groupOf[p].series === each && layers[p] >= least && layers[p] <= most);
    };
    const hover = (at, { buttons, type }) => {
      const { first, last, bytes: size, tensors, elements, stage } = layersOf[at];
      tell(`${text(first, last)}: ${bytes(size)}, ${plural(tensors, "tensor")}${wholeShapes ? `, ${thousands(elements).join(" ")} parameters` : ""}${stages.length > 1 ? `, stage ${stage}` : ""}`);
      if (!buttons || type === "pointerdown") pressed = at; else if (at !== pressed) choose(pressed, at);
    };
    const extend = (at, event, again) => { if (!event.shiftKey) anchor = at; choose(anchor, at, again); };
    const { host, draw } = picture({ class: "strip", "aria-label": `Layers ${clean(prefix)}. Arrow keys choose a layer, with Shift a range.` }, {
      leave: () => tell(), go: (at, event) => { hover(at, event); extend(at, event); }, hover, click: (at, event) => { if (event.key || at === pressed) extend(at, event, true); },
      keys: { Escape: () => { filters.delete(prefix); apply(); } },
    });
    const redraw = () => {
      const width = host.parentElement?.clientWidth || 800, few = stages.length <= 4, shapes = [], cells = [];
      const apart = layersOf.map((layer, at) => (at === 0 ? 0 : layer.stage !== layersOf[at - 1].stage ? few ? 6 : 3 : data.prediction && layer.first === data.prediction[0] ? 10 : 0));
      const wide = (width - sum(apart)) / layersOf.length, thin = wide > 6 ? 2 : wide > 3 ? 1 : 0, tick = [1, 4, 10, 20, 50, 100].find((every) => every * wide / group > 60) || 200;
      let x = 0, begin = 0;
      layersOf.forEach((layer, at) => {
        x += apart[at];
        const { first, last, stage } = layer, shade = few && stage % 2 ? "t" : "b", tall = Math.max(2, 64 * layer.bytes / high), part = (size) => (size ? Math.max(5, 64 * size / layer.bytes) : 0), differs = part(layer.differ), others = Math.min(64 - differs, part(layer.other));
        const faded = filters.has(prefix) && (last < low || first > top) ? ".faded" : "";
        const column = (kind, from, size) => rect(kind + faded, x, from, wide - thin, size);
        shapes.push(compared ? [column("grey", 0, 64), column("amber3", 64 - differs, differs), column("r2", 64 - differs - others, others)] : [column("ground", 0, 64), column(`${shade}2`, 64 - tall, tall), column(`${shade}cap`, 64 - tall, 2)]);
        if (first % tick === 0 || predicts(last)) shapes.push(words("", x + wide / 2, 80, String(first)));
        cells.push({ x, y: 0, width: wide, height: 64 });
        if (!at || stage !== layersOf[at - 1].stage) begin = x;
        if (stages.length > 1 && stage !== layersOf[at + 1]?.stage) shapes.push(rect(`${shade}cap`, begin, 88, x + wide - begin - 1, 2), words("left", begin, 104, few ? `stage ${stageText(stage).replace(",", " ·")}` : String(stage)));
        x += wide;
      });
      draw(cells, cells.length, [0, 0, width, stages.length > 1 ? 110 : 86], shapes);
    };
    listeners.push(redraw);
    redraws.push(redraw);
    return el("div", el("div.between", el("h2", compared ? "Layers: bytes in both" : "Layers: bytes of each", series.size > 1 && el("span.soft", `, ${clean(shortened(prefix, 50))}`)),
      el("span", said, compared && el("span.soft", compared.results.slice(0, 3).map(([, label], code) => (code !== 1 || compared.values) && [el(`i.key.r${code}`), `${label} `])))), host);
  };
  const layerSection = () => {
    const shown = allSeries.filter((each) => each.bytes >= allBytes * 0.05 && each.layers.length > 1).slice(0, 3);
    if (!shown.length) return null;
    const same = compared && groups.every((group) => !group.result);
    return el("section", { id: "layers" }, same ? `All ${plural(count, "tensor")} are ${compared.values ? "equal" : "of the same type and shape"}.` : shown.map(strip));
  };

  // A tree by the dots of names, which shows numbered neighbours of equal content as one row.
  const contents = new Map();
  const interned = (key) => { if (!contents.has(key)) contents.set(key, contents.size); return contents.get(key); };
  const DEEPEST = 200;
  const build = (first, end, depth, label) => {
    if (end - first === 1 && (parts[first].length === depth || depth > DEEPEST)) {
      return { label, first, end, kids: null, worst: worst(first), id: interned(groupOf[first]) };
    }
    const kids = [];
    for (let at = first, to; at < end; at = to) {
      const leaf = parts[at].length === depth + 1 || depth === DEEPEST, part = leaf ? parts[at].slice(depth).join(".") : parts[at][depth];
      to = at + 1;
      if (!leaf) while (to < end && parts[to][depth] === part) to++;
      kids.push(build(at, to, depth + 1, part));
    }
    return { label, first, end, kids, worst: largest(kids.map((kid) => kid.worst)), id: interned(kids.map((kid) => `${kid.label}:${kid.id}`).join("\u0001")) };
  };
  const runEnd = (kids, from) => {
    let to = from + 1;
    if (number.test(kids[from].label)) while (kids[to]?.id === kids[from].id && Number(kids[to].label) === Number(kids[to - 1].label) + 1) to++;
    return to - from > 2 ? to : from + 1;
  };
  const rowsIn = (members, level) => {
    const { kids } = members[0], rows = [];
    for (let from = 0, to; from < kids.length; from = to) {
      to = runEnd(kids, from);
      let inside = members.flatMap((member) => member.kids.slice(from, to));
      const labels = [[inside, to - from > 1]];
      // Chains of single children are one row.
      while (inside[0].kids && runEnd(inside[0].kids, 0) === inside[0].kids.length) {
        const merged = inside[0].kids.length > 1;
        inside = inside.flatMap((member) => member.kids);
        labels.push([inside, merged]);
      }
      rows.push({ members: inside, labels, level, leaf: !inside[0].kids, worst: inside[0].worst });
    }
    return rows;
  };
  // A row of whole names: a tensor, or all that have a pattern.
  const flat = (numbers, level) => ({ members: numbers.map((p) => ({ first: p, end: p + 1 })), level, leaf: true, worst: largest(numbers.map(worst)) });
  const firstOf = (row) => row.members[0].first;
  const inFilter = (members) => members.filter(({ first, end }) => counts[end] > counts[first]);
  const sized = (row) => {
    const total = (sums) => row.members.reduce((all, { first, end }) => all + sums[end] - sums[first], 0);
    if (row.version !== version) Object.assign(row, { version, count: total(counts), bytes: total(totals), text: null, forced: undefined });
    return row;
  };
  const labelOf = (row) => {
    row.text ??= row.labels ? row.labels.map(([members, merged]) => {
      if (!merged) return clean(members[0].label);
      const found = distinct(inFilter(members).map((member) => Number(member.label)));
      row.alike = found.length;
      return ranges(found, 6);
    }).join(".") : patternText(inFilter(row.members).map(({ first }) => first));
    return row.text;
  };
  const expandable = (row) => !row.leaf || row.members.length > 1;
  // A merged tensor opens to its full names.
  const kidsOf = (row) => row.kids ||= row.leaf ? row.members.map(({ first }) => flat([first], row.level + 1)) : rowsIn(row.members, row.level + 1);
  const isOpen = (row) => sized(row).forced ?? (row.open || filtered() && !row.leaf && row.count <= 40);
  const view = { mode: "Tree", by: compared ? "result" : "size", down: true, rows: [], active: -1, chosen: -1 };
  const ORDERS = { name: (a, b) => firstOf(b) - firstOf(a), size: (a, b) => sized(b).bytes - sized(a).bytes || firstOf(a) - firstOf(b), result: (a, b) => b.worst - a.worst || firstOf(a) - firstOf(b) };
  const inOrder = (rows) => [...rows].sort((a, b) => (data.statistics && b.worst - a.worst) || (view.down ? 1 : -1) * ORDERS[view.by](a, b));
  const roots = {};
  const rootsOf = { Tree: () => (count ? rowsIn([build(0, count, 0, "")], 1) : []), Patterns: () => groups.map(({ numbers }) => flat(numbers, 1)), Names: () => names.map((_, p) => flat([p], 1)) };
  const top = () => roots[view.mode] ||= rootsOf[view.mode]();
  // At the start the largest groups are opened while few rows show.
  const open = () => {
    let shown = top().length;
    const closed = top().filter((row) => !row.leaf);
    while (closed.length) {
      closed.sort((a, b) => a.worst - b.worst || sized(a).bytes - sized(b).bytes);
      const row = closed.pop();
      if (shown + kidsOf(row).length > 19) break;
      row.open = true;
      shown += row.kids.length;
      closed.push(...row.kids.filter((each) => !each.leaf));
    }
  };

  // The columns of the list.
  const marked = (text) => (plainWords().length ? text.split(new RegExp(`(${plainWords().map(literally).join("|")})`, "gi")).map((part, n) => (n % 2 ? el("span.hit", part) : part)) : text);
  // The last two parts stay, and before them those from a number on, of a layer or an expert, where that is not long.
  const nameCell = (text) => halves("name", shortened(text), shortened(text).search(/(\.[\d{].{0,31}|(\.[^.]*){2})$/), marked, text);
  const barOf = (part) => el("span.of", el("i", { style: { width: `${100 * part}%` } }));
  // What a tensor has a number of, in one row of data.
  const value = (from, at, shown = short) => (row) => { const found = row.leaf ? from.get(firstOf(row)) : undefined; return found ? shown(found[at], found) : ""; };
  const shapeCell = (row) => (row.leaf ? typeOf(firstOf(row)).shapes.slice(0, 2).map(shapeText).join(" ") : "");
  const typeCell = (row) => {
    row.types ||= [...new Set(row.members.flatMap(({ first, end }) => groupOf.slice(first, end)).map(({ dtype }) => dtype))];
    return row.types.length > 1 ? `${row.types.length} types` : clean(row.types[0]);
  };
  const resultCell = (row) => {
    const codes = addedUp(row.members.flatMap(({ first, end }) => groupOf.slice(first, end).filter((_, at) => mask[first + at])), (group) => group.result, () => 1);
    const code = [1, 2, 3, 4].find((each) => codes.has(each)) ?? 0;
    return el(`span.text.${row.worst === BAD ? "bad" : `r${code}`}`, row.leaf || !code || codes.size === 1 && code > 1 ? row.count === 1 && differing.get(firstOf(row))?.[6] || compared.results[code][0] : `${plain(codes.get(code))} ${code === 1 ? "differ" : compared.results[code][0]}`);
  };
  const column = (title, width, drop, cell) => {
    const sort = title in ORDERS && title, kind = numeric(title), label = el(sort ? "button" : "span", { onclick: () => { if (sort) { view.down = view.by === sort ? !view.down : sort !== "name"; view.by = sort; refresh(); } } });
    return { title, width, drop, cell, sort, kind, label, head: el(`div.${kind}`, { role: "columnheader" }, label) };
  };
  const nameColumn = (row) => {
    const text = labelOf(row), alike = row.alike > 1 && !row.leaf ? `${row.alike} alike` : compared && expandable(row) && plain(row.count);
    return [el(`span.twist.${expandable(row) ? isOpen(row) ? "open" : "shut" : ""}`), nameCell(text || '""'), alike && el("span.alike", alike)];
  };
  // Title, width, which go first as the list narrows, and cell.
  const COLUMNS = [column("name", 0, 0, nameColumn), ...(compared ? [
    column("result", 124, 0, resultCell), column("type", 148, 4, typeCell), column("shape", 110, 3, shapeCell), ...(compared.values ? [
      column("elements", 78, 2, value(differing, 2, (amount, row) => (amount === null ? "" : share(amount, row[1])))), column("largest", 78, 1, value(differing, 4)), column("relative", 92, 5, value(differing, 3, (amount) => amount && el("b.r1.text", short(amount)))),
    ] : []),
  ] : [
    column("", 118, 1, (row) => barOf(row.bytes / (totals[count] || 1))), column("size", 92, 0, (row) => bytes(row.bytes)), column("tensors", 78, 2, (row) => expandable(row) && plain(row.count)),
    column("type", 120, 4, typeCell), column(wholeShapes ? "shape" : "shape in a file", 124, 8, shapeCell), column("cut", 136, 3, (row) => row.leaf && groupOf[firstOf(row)].cut), ...(data.statistics ? [
      column("NaN+Inf", 84, 9, value(statistics, 2, (amount, row) => el(`span.${amount + row[3] ? "bad" : ""}`, plain(amount + row[3])))),
      ...[["min", 7, 5], ["max", 6, 6], ["norm", 5, 8]].map(([title, drop, at]) => column(title, 94, drop, value(statistics, at))),
    ] : []),
  ])];
  // Columns go as the list narrows, so that names keep their room.
  const columnsFor = (width) => {
    let shown = COLUMNS.filter(({ title }) => (title || view.mode === "Tree") && (title !== "cut" || groups.some((group) => group.cut)));
    const room = () => width - sum(shown.map((column) => column.width));
    for (let drop = 1; drop < 10; drop++) if (room() < (width < 600 ? 170 : view.mode === "Tree" ? 250 : 400)) shown = shown.filter((column) => column.drop !== drop);
    return shown;
  };

  // The list.
  const body = el("div.rows", { role: "rowgroup" });
  const head = el("div.head", { role: "row" }, COLUMNS.map((column) => column.head));
  const list = el("div.grid", {
    id: "list", role: "treegrid", tabindex: 0, "aria-label": compared ? "Differences" : "Tensors", onscroll: () => later(),
    onkeydown: keysOf({
      ArrowDown: () => pick(view.active + 1), ArrowUp: () => pick(view.active - 1), Home: () => pick(0), End: () => pick(view.rows.length - 1),
      PageDown: () => pick(view.active + 12), PageUp: () => pick(view.active - 12), ArrowRight: () => fold(view.active, true), ArrowLeft: () => fold(view.active, false), Enter: () => fold(view.active), Escape: () => clearAll(),
    }),
  }, head, body);
  let waiting = 0;
  const later = () => { waiting ||= requestAnimationFrame(() => { waiting = 0; drawList(); }); };
  const refresh = () => {
    const rows = [], kept = view.rows[view.active], found = counts[count];
    const walk = (inside) => {
      for (const row of inOrder(inside.filter((each) => sized(each).count))) {
        if (rows.length >= MOST_ROWS) return;
        rows.push(row);
        if (expandable(row) && isOpen(row)) walk(kidsOf(row));
      }
    };
    walk(top());
    view.rows = rows;
    view.active = rows.indexOf(kept);
    list.setAttribute("aria-rowcount", rows.length + 1);
    drawList();
    status.textContent = `${plural(found, "tensor")}${filtered() ? ` of ${plain(count)}` : ""} · ${bytes(totals[count])}${filtered() ? ` · ${share(totals[count], allBytes)}` : ""}${rows.length < MOST_ROWS ? "" : ` · the first ${plain(MOST_ROWS)} rows`}`;
    chips.replaceChildren(...[...filters].map(([key, { value: text }]) => el("button.chip", { "aria-label": `Remove filter ${clean(text)}`, onclick: () => { filters.delete(key); apply(); list.focus(); } }, `${clean(shortened(text, 40))} ×`)));
    nothing.hidden = found > 0 || !filtered();
    modes.forEach((each) => each.setAttribute("aria-pressed", each.textContent === view.mode));
  };
  const drawList = () => {
    const shown = columnsFor(list.clientWidth);
    list.style.setProperty("--columns", shown.map(({ width }) => (width ? `${width}px` : "minmax(170px,1fr)")).join(" "));
    for (const column of COLUMNS) {
      const { title, sort, head: cell, label } = column, on = sort && view.by === sort;
      cell.hidden = !shown.includes(column);
      label.textContent = `${title}${on ? view.down ? " ▾" : " ▴" : ""}`;
      label.className = on ? "on" : "";
      cell.setAttribute("aria-sort", on ? view.down ? "descending" : "ascending" : "none");
    }
    drawRows(list, body, view.rows.length, (at) => {
      const row = sized(view.rows[at]), on = at === view.active;
      return [{
        id: `row${at}`, "aria-level": row.level, "aria-selected": String(on), "aria-expanded": expandable(row) ? String(isOpen(row)) : null, class: `row${on ? " on" : row.leaf && firstOf(row) === view.chosen ? " chosen" : ""}`,
        onclick: () => { pick(at); fold(at); },
      }, shown.map((column, n) => el(`div.cell.${n ? column.kind : "first"}`, { role: "gridcell", style: n ? {} : { paddingLeft: `${14 * row.level - 4}px` } }, column.cell(row)))];
    });
    list.setAttribute("aria-activedescendant", `row${view.active}`);
  };
  const pick = (wanted) => {
    view.active = between(wanted, 0, view.rows.length - 1);
    const y = view.active * ROW;
    list.scrollTop = between(list.scrollTop, y + 2 * ROW + 8 - list.clientHeight, y);
    const row = view.rows[view.active];
    if (row?.leaf) choose(inFilter(row.members)[0].first);
    drawList();
  };
  const fold = (at, wanted) => {
    const row = view.rows[at];
    if (row && expandable(row) && (wanted !== false || isOpen(row))) {
      row.open = row.forced = wanted ?? !isOpen(row);
      refresh();
    } else if (wanted === false) {
      // To the parent.
      const up = view.rows.findLastIndex((each, n) => n < at && each.level < row.level);
      if (up >= 0) pick(up);
    }
  };
  const search = el("input", {
    type: "search", id: "search", placeholder: "Search names: experts down_proj, or *.layers.3.*", "aria-label": "Search tensors", autocomplete: "off", spellcheck: "false",
    oninput: () => { searched = search.value.toLowerCase().split(/\s+/).filter(Boolean); list.scrollTop = 0; apply(); },
    onkeydown: keysOf({ ArrowDown: () => { list.focus(); pick(Math.max(0, view.active)); }, Escape: () => clearAll() }),
  });
  const status = el("span.soft", { role: "status", id: "matches" }), chips = el("span", { id: "chips" });
  const nothing = el("p.nothing", "No tensor matches. ", el("button.link", { onclick: () => clearAll() }, "Clear filters"));
  const modes = Object.keys(rootsOf).map((mode) => el("button", { onclick: () => { view.mode = mode; view.active = -1; list.scrollTop = 0; refresh(); } }, mode));
  addEventListener("keydown", (event) => { if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); search.focus(); } });
  listeners.push(refresh);

  // One tensor.
  const inspector = el("aside", { id: "inspector", "aria-label": "The chosen tensor" });
  const pairsOf = (pairs) => el("dl", pairs.filter(([, value]) => value).map(([term, value]) => [el("dt", term), el("dd.text", value)]));
  const SCALES = [["weight", "weight_scale_inv"], ["weight", "weight_scale"], ["weight_packed", "weight_scale"], ["_blocks", "_scales"]];
  // The scales of a weight, or the weight of scales.
  const partner = (p) => SCALES.flatMap((pair) => [pair, [...pair].reverse()]).filter(([mine]) => names[p].endsWith(mine))
    .map(([mine, theirs]) => [indexOf.get(names[p].slice(0, -mine.length) + theirs), theirs]).find(([found]) => found !== undefined && found !== p);
  const cutWords = ({ split, shards, shardings: [{ cuts }] }) => {
    const over = (n, name) => (n === axis(name) ? `over ${name} ${n}` : `cut ${n}`), agrees = split.length === cuts.length && split.every((n, d) => n * (d ? 1 : shards) === cuts[d]);
    const said = (agrees ? split : cuts).flatMap((n, d) => (n > 1 ? [`dimension ${d} ${agrees ? over(n, "mp") : `cut ${n}`}`] : []));
    if (agrees && shards > 1) said.push(`dimension 0 ${over(shards, "dp")}`);
    return said.join(", ") || (unit === "rank" ? "whole on every rank" : "");
  };
  const choose = (p, keep) => {
    view.chosen = p;
    // Not everywhere has a page an address, and not every name has one.
    if (!keep) try { history.replaceState(null, "", `#${encodeURIComponent(names[p])}`); } catch { /* The choice counts. */ }
    const { size, full, shapes, held } = typeOf(p), layout = layoutOf(p), [dims = []] = shapes, group = groupOf[p], link = partner(p);
    const name = clean(names[p]), end = name.lastIndexOf(".") + 1;
    inspector.replaceChildren(
      el("h3", { id: "chosen", title: name }, breaks(shortened(name.slice(0, end))), el("b", shortened(name.slice(end)))),
      pairsOf([
        ["Type", clean(group.dtype)], [full === null ? "In a file" : "Shape", `${shapes.slice(0, 3).map(shapeText).join(", ")}${layout || shapes.length === 1 ? ` = ${plural(product(dims), "element")}` : ""}${compared?.shapes[p] ? `; in B ${shapeText(compared.shapes[p])}` : ""}`],
        ["Size", size && `${bytes(size)}${size >= 1024 ? `, ${plain(size)} bytes` : ""}${full === null ? ` in ${plural(held, "file")}` : ""}`], ["Kind", (group.kind !== "weights" || hasState) && group.kind],
        ["Cut", layout ? cutWords(layout) : unit === "rank" && !compared && "unknown: no strategy"], ["Stage", layout && stageText(layout.stage)],
        [SCALE.test(names[p]) ? "Weight" : "Scales", link && el("button.link", { onclick: () => choose(link[0]) }, clean(link[1]))],
        ["Alike", group.numbers.length > 1 && [`${plural(group.numbers.length, "tensor")}, ${bytes(group.size * group.numbers.length)}: `, el("span.soft", breaks(patternText(group.numbers)))]],
      ]),
      ...(compared ? [difference(p)] : layout ? layout.shardings.map((sharding, way) => slices(p, sharding, way)) : [getCommand(p)]),
      statistics.has(p) ? numbers(statistics.get(p)) : "");
    drawList();
  };
  const getCommand = (p, box = [], dims = []) => command(["reshard", "get", quote(data.source), quote(names[p]), ...(box.some(([start, stop], d) => stop - start !== dims[d]) ? ["--slice", box.map((each) => each.join(":")).join(",")] : []), ...data.options.map(quote)]);
  const slices = (p, { cuts: cutsOf, edges: edgesOf, slices: all, states, lacking, copies }, way) => {
    const [dims = []] = typeOf(p).shapes, missing = Math.max(0, 2 - dims.length), whole = all.length === 1;
    // A scalar or a vector is drawn as a matrix.
    const padded = (values) => [...[1, 1].slice(0, missing), ...values], shape = padded(dims), cuts = padded(cutsOf);
    const edges = cuts.map((n, d) => edgesOf[d - missing] || Array.from({ length: n + 1 }, (_, at) => shape[d] / n * at));
    const wide = cuts.flatMap((n, d) => (n > 1 ? [d] : [])), [r, c] = wide.length > 1 ? wide : wide[0] > 0 ? [wide[0] - 1, wide[0]] : [0, 1];
    const [rows, across] = [cuts[r], cuts[c]], scale = Math.min(350 / (shape[c] || 1), 216 / (shape[r] || 1));
    const width = Math.min((inspector.clientWidth || 408) - 58, 350, Math.max(24, shape[c] * scale)), height = Math.max(24, shape[r] * scale, Math.min(216, rows > 1 && rows * 14)), low = height / rows < 13;
    // Neighbours are one cell above 4,096 slices.
    let step = 1;
    while (Math.ceil(rows / step) * Math.ceil(across / step) > 4096) step++;
    const columns = Math.ceil(across / step), strides = cuts.map((_, d) => product(cuts.slice(d + 1)));
    const along = (d, slice) => Math.floor(slice / strides[d]) % cuts[d];
    const position = (d, n, size) => { const ends = edges[d]; return size * ends[Math.min(n, ends.length - 1)] / (ends[ends.length - 1] || 1); };
    const cells = [];
    all.forEach((holders, slice) => {
      const [y, x] = [Math.floor(along(r, slice) / step), Math.floor(along(c, slice) / step)], at = y * columns + x;
      const [top, end, left, right] = [position(r, y * step, height), position(r, (y + 1) * step, height), position(c, x * step, width), position(c, (x + 1) * step, width)], gap = Math.min(end - top, right - left) > 6 ? 1 : 0;
      const cell = cells[at] ||= { x: left + gap, y: top + gap, width: Math.max(0.5, right - left - 2 * gap), height: Math.max(0.5, end - top - 2 * gap), kind: `${unit === "rank" && stageOf(holders[0]) % 2 === 1 ? "t1" : "b1"}`, slice, state: "held" };
      // A cell of several slices is as bad as its worst.
      if (states[slice] === "lost" && cell.state !== "lost" || states[slice] === "part" && cell.state === "held") Object.assign(cell, { slice, state: states[slice] });
    });
    for (const cell of cells) {
      const shown = fileNumbers(all[cell.slice]), text = cell.state === "lost" ? `${ranges(shown, 2)} lost` : shown.slice(0, 3).join(", ") + (shown.length > 3 ? " …" : "");
      if (cell.state !== "held") cell.kind += `.${cell.state}`;
      if (!low && !whole) cell.text = [text, String(shown[0])].find((each) => each.length * 7 < cell.width);
    }
    const output = el("div.output", { "aria-live": "polite" });
    const select = (at) => {
      const { slice } = cells[at], holders = all[slice], absent = holders.filter((file) => lacking.has(file)), box = edges.map((ends, d) => [ends[along(d, slice)], ends[along(d, slice) + 1]]).slice(missing);
      const size = product(box.map(([start, stop]) => stop - start)) * typeOf(p).full / product(dims) || 0;
      mark(at);
      outline(fileNumbers(holders));
      const [one] = holders, place = whole && holders.length === 1 && placesIn(one)?.get(p), fileSize = files.bytes[fileAt.get(fileNumber(one))];
      output.replaceChildren(
        el("p.box", el("b", whole ? "all" : `slice ${slice}`), ` ${shapeText(box.map((each) => each.join(":")))} `,
          states[slice] === "lost" ? el("span.bad", `is on no ${unit} that is left`) : absent.length ? el("span.warn", `not on ${places(fileNumbers(absent))}`) : el("span.soft", `on ${places(fileNumbers(holders))}`)),
        table([unit === "rank" ? "rank" : "number", "file", "offset", "bytes"], holders.slice(0, 8).map((file) => {
          const found = lacking.has(file) ? undefined : placesIn(file)?.get(p), path = files.path[fileAt.get(fileNumber(file))] ?? null;
          return [fileNumber(file), path === null || lacking.has(file) ? el("span.bad", path === null ? "missing" : "not in it") : pathText(path), found && plain(found[0]), plain(found ? found[1] : size)];
        })),
        holders.length > 8 ? el("p.soft", `and ${plain(holders.length - 8)} more`) : "",
        place && fileSize ? el("svg.place", { viewBox: "0 0 100 14", preserveAspectRatio: "none", role: "img", "aria-label": `at byte ${plain(place[0])} of ${plain(fileSize)}` }, rect("ground", 0, 0, 100, 14), rect("b4", 100 * place[0] / fileSize, 0, Math.max(0.5, 100 * place[1] / fileSize), 14)) : "",
        way ? "" : getCommand(p, box, dims));
    };
    const labels = [], block = whole && dims.length === 2 && partner(p) && !SCALE.test(names[p]) && data.block, { split, shards } = layoutOf(p);
    // The outer axis of slices that are too low for numbers.
    const outer = low && shards > 1 && r === 0 ? split[0] : 1;
    for (let n = 0; outer > 1 && n < outer; n++) labels.push(words("left", width + 6, height / outer * n + 11, `from ${unit} ${fileNumber(all[rows / outer * n * strides[r]][0])}`));
    const label = (d, size, need, last, put) => edges[d].forEach((edge, n) => {
      const end = n === edges[d].length - 1;
      if (end || n % Math.ceil(need * (edges[d].length - 1) / size) === 0 && position(d, n, size) < size - last) put(String(edge), position(d, n, size), end && n);
    });
    if (dims.length > 1) label(r, height, 13, 14, (text, y, end) => labels.push(words("right", -6, y + (end ? 2 : 8), text)));
    if (dims.length && (across > 1 || width > 60)) label(c, width, 46, 40, (text, x, end) => labels.push(words(end ? "right" : x ? "" : "left", x, -5, text)));
    const said = whole ? copies > 1 ? `Whole on ${plural(copies, unit)}` : "Whole, not cut" : `${plain(all.length)} slices, each on ${copies === 1 ? `one ${unit}` : plural(copies, unit)}`;
    const others = wide.filter((d) => d !== r && d !== c), margin = Math.max(40, 7 * String(shape[r]).length + 10);
    const { host, draw, mark } = picture({ class: "slices", id: way ? null : "slices", "aria-label": `Slices of ${clean(shortened(names[p], 80))}: ${said}. Arrow keys move.` }, { go: select });
    draw(cells, columns, [-margin, -28, width + margin + (outer > 1 ? 98 : 12), height + 34], labels, dims.length > 1 ? words("left", 0, -18, `dimension ${c - missing}: ${plain(shape[c])}${across > 1 ? `, cut ${across}` : ""}`) : []);
    const lines = (every, end, line) => { let path = ""; for (let at = every; at < end; at += every) path += line(at / end); return path; };
    if (block) host.append(el("path.edge", { d: lines(block[0], dims[0], (at) => `M0 ${at * height}h${width}`) + lines(block[1], dims[1], (at) => `M${at * width} 0v${height}`) }));
    if (outer > 1) host.append(el("path.edge", { d: lines(1, outer, (at) => `M0 ${at * height}h${width}`) }));
    if (cells.length) select(Math.max(0, cells.findIndex((cell) => cell.state === "lost")));
    return el("div", el("h4", way ? `Held also: ${said}` : said), host, block && el("p.soft", `${Math.ceil(dims[0] / block[0])} × ${Math.ceil(dims[1] / block[1])} blocks of ${block[0]} × ${block[1]}, a scale each`),
      others.length > 0 && el("p.soft", `also cut: ${others.map((d) => `dimension ${d} in ${cuts[d]}`).join(", ")}; its first part is shown`), output);
  };
  // How many elements there are of each power of two, and other numbers.
  const numbers = (row) => {
    const place = row[9] && el("span.bad", `${shapeText(row[9].index)}${row[9].file === null ? "" : `, ${unit} ${row[9].rank}, ${clean(row[9].file)}`}`), [lowest, levels = ""] = row[10] || [], wide = 350 / levels.length, span = [`2^${lowest}`, `2^${lowest + levels.length - 1}`];
    return el("div", el("h4", "Numbers"), pairsOf([...["elements", "NaN", "Inf", "zeros", "min", "max", "mean", "norm"].map((title, n) => [title, row[n + 1] !== null && exact(row[n + 1])]), ["first NaN or Inf", place]]),
      levels && el("svg", { width: 350, height: 60, role: "img", "aria-label": `magnitudes from ${span.join(" to ")}` }, [...levels].map((level, n) => rect("b4", n * wide, 44 - level * 5.5, Math.max(1, wide - 1), level * 5.5)), words("left", 0, 57, span[0]), words("right", 350, 57, span[1])));
  };
  const difference = (p) => {
    const row = differing.get(p), code = groupOf[p].result;
    const first = (title, found) => found && [el("h4", title), el("table.first", el("tr", el("th", { scope: "row" }, "at"), el("td", shapeText(found[0])), el("td")), [1, 3].map((n) => el("tr", side(n >> 1), el("td", short(found[n])), el("td.soft", pathText(found[n + 1])))))];
    return el("div", el(`p.r${code}.text`, `${compared.results[code][0]}${row && row[2] !== null ? `: ${row[2] ? `${plain(row[2])} of ${plural(row[1], "element")}` : code > 1 ? "all values are equal" : "bits only"}` : ""}`),
      row && [row[6] && el("p.bad", row[6]), first("First NaN or Inf in one only", row[7]), first("First of the largest differences", row[5])],
      command(["reshard", "diff", ...compared.sides.map((each) => quote(each.path)), "--include", quote(names[p].replace(/[[?*]/g, "[$&]")), ...data.options.map(quote)]));
  };

  // A conversion: bytes from every source to every target. Too many ranks come as groups of neighbours.
  const conversion = (moves) => {
    const { together } = moves, grouped = together > 1, nouns = grouped ? ["group", "group"] : [moves.source_noun, moves.target_noun];
    const ends = [moves.sources, moves.targets].map((total) => Math.ceil(total / together)), clusters = [moves.source_cluster, moves.target_cluster];
    const stagesOf = clusters.map((each) => (each && !grouped ? each.stages : [])), staged = stagesOf.map((found) => found.length > 1);
    const ENDS = ["source", "target"], pairs = [];
    [moves.parameters, moves.copied].forEach((relation, copied) => repeated(relation.pattern).forEach((found, target) => {
      if (found < 0) return;
      const [value, ...others] = moves.patterns[found], add = (from, at) => pairs.push([from, target, ...moves.values[at], copied]);
      let source = relation.first[target];
      add(source, value);
      for (let n = 0; n < others.length; n += 2) add(source += others[n], others[n + 1]);
    }));
    // One cell is so many ranks, or a stage.
    const chunks = ([first, end], size) => Array.from({ length: Math.ceil((end - first) / size) }, (_, at) => [first + at * size, Math.min(end, first + (at + 1) * size)]);
    const longest = Math.max(...ends), finest = [1, 8, 64, 512].find((level) => longest / level <= 128) || 4096;
    const levels = [...(staged[0] && staged[1] ? [0] : []), ...(finest * 16 <= longest ? [finest * 8] : []), finest];
    let shown = [], size = [1, 1], cells = [], cursor = 0, target = 0, level = 0, inside = false;
    const ranks = (n, [first, end]) => `${ENDS[n]} ${nouns[n]}${end - first > 1 ? "s" : ""} ${extent(first, end - 1)}`;
    const said = el("p", { id: "cell", "aria-live": "polite" }), detail = el("div", { id: "detail" }), legend = el("div.legend"), axes = el("g");
    const tell = (at) => {
      const { row, column, size: amount, copied, asked } = cells[at];
      said.textContent = `${ranks(0, row)} to ${ranks(1, column)}: ${plain(amount + copied)} bytes in ${plural(asked, "request")}${copied ? `, ${plain(copied)} of them values copied as they are` : ""}`;
    };
    // Neighbours with the same label, which is the stage or the first rank.
    const spansOf = (n) => {
      const spans = [];
      shown[n].forEach(([first], at) => {
        const byStage = staged[n] && !inside, label = String(byStage ? stageOf(first, stagesOf[n]) : first), last = spans[spans.length - 1];
        if (byStage && last?.label === label) last.to++; else spans.push({ label, from: at, to: at + 1, byStage });
      });
      return spans;
    };
    const point = (at) => {
      cursor = at;
      const { x, y, row, column } = cells[at], [width, height] = size;
      axes.replaceChildren(...[row, column].flatMap((active, n) => {
        const spans = spansOf(n), index = shown[n].indexOf(active), on = spans.findIndex(({ from, to }) => index >= from && index < to);
        const every = Math.ceil((n ? 7 * largest(spans.map(({ label }) => label.length)) + 8 : 12) * spans.length / ([height, width][n] * shown[n].length));
        return spans.flatMap(({ label, from, to }, at) => {
          const middle = (from + to) / 2 * [height, width][n], chosen = at === on ? "chosen" : "";
          return chosen || at % every === 0 && Math.abs(at - on) >= every ? [n ? words(chosen, middle, -8, label) : words(`right.${chosen}`, -7, middle + 4, label)] : [];
        });
      }), width < 30 ? el("path.guide", { d: `M0 ${y + height / 2}H${x}M${x + width / 2} 0V${y}` }) : "");
      matrix.mark(at);
    };
    const go = (at) => { point(at); tell(at); show(cells[at].column[0]); };
    // A cell one level finer, in place of all.
    const divided = (range) => chunks(range, Math.max(1, 8 ** Math.floor(Math.log(range[1] - range[0] - 1) / Math.log(8))));
    const enter = () => { const { row, column } = cells[cursor]; if (row[1] - row[0] > 1 || column[1] - column[0] > 1) { inside = true; draw([divided(row), divided(column)]); } };
    const setLevel = (next) => { level = next; inside = false; draw(ends.map((total, n) => (level ? chunks([0, total], level) : stagesOf[n].map(([first, devices]) => [first, first + devices])))); };
    const matrix = picture({ id: "matrix", "aria-label": `Bytes from ${plural(ends[0], `source ${nouns[0]}`)}, down, to ${plural(ends[1], `target ${nouns[1]}`)}, across. Arrow keys move, Enter goes down, Backspace up.` }, {
      go, hover: tell, click: (at, event) => { if (event.key) enter(); else go(at); }, keys: { Backspace: () => setLevel(level) },
    });
    const draw = (found) => {
      const [rows, columns] = shown = found, room = between(matrix.host.parentElement?.clientWidth || 720, 240, 720) - 130;
      const width = between(room / columns.length, 1.5, columns.length <= 8 ? 84 : 48), height = between(560 / rows.length, 1.5, width >= 30 ? 34 : Math.max(width, 3)), gap = width > 5 ? 1 : 0;
      size = [width, height];
      cells = rows.flatMap((row, y) => columns.map((column, x) => ({ row, column, x: x * width, y: y * height, width: width - gap, height: height - gap, size: 0, copied: 0, asked: 0 })));
      const index = shown.map((each, n) => { const at = new Int32Array(ends[n]).fill(-1); each.forEach(([first, end], cell) => at.fill(cell, first, end)); return at; });
      for (const [source, target, taken, requests, copied] of pairs) {
        const [y, x] = [index[0][source], index[1][target]];
        if (y < 0 || x < 0) continue;
        const cell = cells[y * columns.length + x];
        cell[copied ? "copied" : "size"] += taken;
        cell.asked += requests;
      }
      const best = cells.reduce((most, cell, at) => (cell.size > cells[most].size ? at : most), 0), high = cells[best].size, power = byteUnits.indexOf(binary(high)[1]), kinds = new Set();
      for (const cell of cells) {
        const amount = cell.size / 1024 ** power;
        if (cell.size) Object.assign(cell, { kind: `b${Math.ceil(5 * cell.size / high)}`, text: width > 64 ? bytes(cell.size) : width >= 30 && height >= 14 && amount.toFixed(amount >= 100 || !power ? 0 : 1) });
        else if (cell.copied) Object.assign(cell, { kind: "amber3", low: true });
        kinds.add(cell.kind);
      }
      const [right, bottom] = [width * columns.length, height * rows.length], sums = ["row", "column"].map((side) => [...addedUp(cells, (cell) => cell[side], (cell) => cell.size + cell.copied).values()]), most = sums.map((each) => largest(each) || 1);
      const title = (n) => `${ENDS[n]} ${staged[n] && !inside ? "stage" : nouns[n]}, ${plural(ends[n], nouns[n])}`, bounds = (n) => spansOf(n).filter(({ from, byStage }) => from && byStage).map(({ from }) => from * [height, width][n]);
      const down = words("right.chosen", 0, 0, title(0));
      set(down, { transform: "translate(-60 0) rotate(-90)" });
      matrix.draw(cells, columns.length, [-74, -44, right + 130, bottom + 84], rect("panel", 0, 0, right, bottom), el("path", { d: bounds(0).map((y) => `M0 ${y}h${right}`).join("") + bounds(1).map((x) => `M${x} 0v${bottom}`).join("") }), axes,
        words("left.chosen", 0, -32, title(1)), down, words("left", right + 6, -8, "read"), words("right", -7, bottom + 18, "written"),
        sums[0].map((value, y) => rect("b2", right + 6, y * height, 46 * value / most[0], Math.max(1, height - 1))), sums[1].map((value, x) => rect("b2", x * width, bottom + 6, Math.max(1, width - 1), 24 * value / most[1])));
      legend.replaceChildren(...["b1", "b2", "b3", "b4", "b5"].filter((kind) => kinds.has(kind)).map((kind, n) => el("span", el(`i.key.${kind}`), `${n ? "" : "up to "}${bytes(high * kind[1] / 5)}`)), kinds.has("amber3") ? el("span", el("i.key.amber3"), "values copied as they are") : "",
        el("span.soft", `${width >= 30 && width <= 64 ? `in ${byteUnits[power]}; ` : ""}${inside ? "here " : ""}at most ${bytes(most[1])} of tensors written and ${bytes(most[0])} read by a ${level || inside ? columns[0][1] - columns[0][0] > 1 ? `cell of ${columns[0][1] - columns[0][0]} ${nouns[1]}s` : nouns[1] : "stage"}`));
      buttons.forEach((each, n) => each.setAttribute("aria-pressed", levels[n] === level && !inside));
      go(best);
    };
    const input = el("input", { type: "number", id: "targetnumber", min: 0, max: ends[1] - 1, value: 0, oninput: () => { if (input.value !== "" && input.validity.valid) show(Number(input.value), true); } });
    const show = (wanted, only) => {
      target = wanted;
      if (document.activeElement !== input) input.value = target;
      const mine = pairs.filter(([, to]) => to === target), takenBy = addedUp(mine, ([source]) => source, (pair) => pair[2]), asked = addedUp(mine, ([source]) => source, (pair) => pair[3]);
      const order = mostFirst(takenBy), all = sum([...takenBy.values()]), { row, column, size: amount, copied } = cells[cursor], stage = (n, [first]) => (staged[n] ? `, stage ${stageOf(first, stagesOf[n])}` : "");
      detail.replaceChildren(only ? "" : el("p", el("b", bytes(amount + copied)), ` from ${ranks(0, row)}${stage(0, row)} to ${ranks(1, column)}${stage(1, column)} `, (row[1] - row[0] > 1 || column[1] - column[0] > 1) && el("button.link", { onclick: enter }, "one level finer"), inside && el("button.link", { onclick: () => setLevel(level) }, " back to all")),
        el("h4", { id: "target" }, `Target ${nouns[1]} ${target} reads ${bytes(all)} from ${plural(order.length, nouns[0])}`),
        table([`source ${nouns[0]}`, ...(staged[0] ? ["stage"] : []), "bytes", "share", "requests"], order.slice(0, 5).map(([source, taken]) => [source, ...(staged[0] ? [stageOf(source, stagesOf[0])] : []), el("span", { title: plain(taken) }, bytes(taken)), share(taken, all), plain(asked.get(source))])),
        order.length > 5 ? el("p.soft", `and ${plain(order.length - 5)} more`) : "", moves.command && !grouped ? command(moves.command.map((word) => (word === "{rank}" ? String(target) : quote(word)))) : "");
    };
    const buttons = levels.map((each) => el("button", { onclick: () => setLevel(each) }, each > 1 ? `${each} ${nouns[0]}s` : each ? `${nouns[0][0].toUpperCase()}${nouns[0].slice(1)}s` : "Stages"));
    redraws.push(() => {
      const at = cursor;
      if (cells.length) { draw(shown); go(at); } else setLevel(finest);
    });
    return el("section", { id: "conversion" }, el("div.tools", el("h2", "Conversion"), levels.length > 1 && el("span.modes", buttons), el("span.soft", moves.line), el("span.gap"), el("label.soft", { for: "targetnumber" }, `target ${nouns[1]}`), input),
      el("div.facts.four", moves.facts.map(([label, figure, small, soft, kind]) => fact(label, el(`span.${kind}`, figure), small, soft))),
      el("div.two", el("div", matrix.host, legend, said), detail));
  };

  // Ranks and files.
  const fileList = (found, noun, label) => {
    const order = found.number.map((_, n) => n).sort((a, b) => (found.state[b] !== "ok") - (found.state[a] !== "ok") || a - b), most = largest(found.bytes) || 1;
    const rows = el("div.rows", { role: "rowgroup" }), host = el("div.grid.files", { tabindex: 0, role: "grid", "aria-label": label, "aria-rowcount": order.length, onscroll: () => draw() }, rows);
    const draw = () => drawRows(host, rows, order.length, (at) => {
      const n = order[at], state = found.state[n], path = found.path[n], size = found.bytes[n], same = found.same[n] ?? found.number[n];
      return [["n", found.number[n]], ["first", path === null ? "none" : pathText(path)], ["n", state !== "missing" && bytes(size)], ["w", barOf(size / most)], ["", el(state === "ok" ? "span.soft" : "span.bad", state)], ["w.soft", same !== found.number[n] && `as ${noun} ${same}`]]
        .map(([kind, inside]) => el(`div.cell.${kind}`, { role: "gridcell" }, inside));
    });
    redraws.push(draw);
    return host;
  };
  const filesTitle = unit === "rank" ? "Ranks and files" : "Files";
  const fileSection = () => el("section", { id: "files" }, el("h2", filesTitle),
    data.steps.length > 1 && table(["step", "size", "state", ""], data.steps.slice(0, 200).map((step) => [step.step === null ? "no step in the names" : clean(step.step), step.nbytes !== null && bytes(step.nbytes), step.state, step.shown && "shown here"])),
    compared ? compared.sides.map((each, n) => [el("h4", `${"AB"[n]}: ${clean(each.path)}`), fileList(filesOf(each.files), "file", `Files of ${"AB"[n]}`)]) : [el("p.soft", `below ${clean(data.files.base)}`), fileList(files, unit, filesTitle)]);

  // Everything together.
  const listTitle = compared ? "Differences" : "Tensors", madeOf = !compared && made(), cutting = !compared && cut();
  const sections = [["overview", "Overview", el("section", { id: "overview" }, compared ? differences() : facts(), (madeOf || cutting) && el("div.halves", madeOf, cutting)), layerSection()], ["conversion", "Conversion", data.moves && conversion(data.moves)],
    ["tensors", listTitle, el("section", { id: "tensors" }, el("div.tools", el("h2", listTitle), el("span.searching", search, el("kbd", "/")), el("span.modes", modes), chips, el("span.gap"), status), el("div.pane", el("div", list, nothing), inspector))],
    ["files", filesTitle, fileSection()]].filter(([, , section]) => section);
  const links = sections.map(([, title, section]) => el("a", { href: `#${section.id}`, onclick: (event) => { event.preventDefault(); section.scrollIntoView(); } }, title));
  document.body.append(header, el("nav", { "aria-label": "Sections" }, el("div", links)), el("main", problems(), sections.map(([, , ...each]) => each)),
    el("footer", el("p.mono", clean(data.command)), el("p", data.foot)));
  const current = () => {
    // The last section may be too short to reach the top.
    const end = scrollY > 0 && scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
    const on = end ? sections.length - 1 : Math.max(0, sections.findLastIndex(([, , section]) => section.getBoundingClientRect().top <= 60));
    links.forEach((link, n) => link.setAttribute("aria-current", n === on));
  };
  addEventListener("scroll", current, { passive: true });
  current();
  apply();
  open();
  refresh();
  redraws.forEach((redraw) => redraw());
  const hashed = () => { try { return indexOf.get(decodeURIComponent(location.hash.slice(1))); } catch { return undefined; } };
  const lost = names.findIndex((_, p) => layoutOf(p)?.lost), weight = ({ numbers: found, size, bad }) => (bad ? Infinity : compared ? worst(found[0]) : size * found.length);
  const start = hashed() ?? (lost >= 0 ? lost : mostFirst(groups.map((group) => [group.numbers[0], weight(group)]))[0]?.[0]);
  if (start !== undefined) choose(start, true);
  addEventListener("hashchange", () => { const p = hashed(); if (p !== undefined) choose(p, true); });
  const again = () => { redraws.forEach((redraw) => redraw()); drawList(); };
  for (const [name, on] of [["beforeprint", true], ["afterprint", false]]) addEventListener(name, () => { printing = on; again(); });
  // Pictures depend on the width alone; the list's height changes with its rows.
  let wide = list.clientWidth;
  new ResizeObserver(() => {
    if (list.clientWidth === wide) { later(); return; }
    wide = list.clientWidth;
    requestAnimationFrame(again);
  }).observe(list);
  requestAnimationFrame(() => { document.body.dataset.drawn = Math.round(performance.now() - started); });
})();
