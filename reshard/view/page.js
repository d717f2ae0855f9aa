"use strict";
(() => {
  const started = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const compared = data.compared || null;
  const ROW = 28;
  const MOST_ROWS = 500000;

  // Texts. Names come from files of others: they become text nodes only, and marks that change how text reads are shown.
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
  const clean = (text) => String(text).replace(HIDDEN, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  const lines = (text) => String(text).split("\n").map(clean).join("\n");
  const shortened = (text, most = 400) => (text.length > most ? `${text.slice(0, most / 2)}…${text.slice(-most / 2)}` : text);
  const fill = (made, attributes, children) => {
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return made;
  };
  const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);
  const [div, span, paragraph] = ["div", "span", "p"].map((tag) => (name, ...children) => el(tag, { class: name }, ...children));
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  // A picture that shrinks with the window.
  const scalable = (width, height) => ({ width, height, viewBox: `0 0 ${width} ${height}` });
  const format = new Intl.NumberFormat("en");
  const plain = (value) => format.format(value);
  const scaled = (size, base, units, most) => {
    let unit = 0;
    while (size >= base && unit < units.length - 1) { size /= base; unit++; }
    return [unit ? (size >= most ? plain(Math.round(size)) : size.toFixed(1)) : plain(Math.round(size)), units[unit]];
  };
  const byteUnits = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const binary = (size) => scaled(size, 1024, byteUnits, 1000);
  const thousands = (amount) => scaled(amount, 1000, ["", "k", "M", "B", "T"], 1000);
  const bytes = (size) => binary(size).join(" ");
  const share = (part, whole) => {
    const percent = whole ? 100 * part / whole : 0;
    return percent && percent < 0.1 ? "< 0.1 %" : `${percent.toFixed(1)} %`;
  };
  const plural = (count, noun) => `${plain(count)} ${noun}${count === 1 ? "" : "s"}`;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const product = (values) => values.reduce((total, value) => total * value, 1);
  const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
  const number = /^(0|[1-9]\d{0,14})$/;
  const ranges = (numbers, most = 12, dash = "–") => {
    const words = [];
    for (let at = 0; at < numbers.length;) {
      let end = at;
      while (end + 1 < numbers.length && numbers[end + 1] === numbers[end] + 1) end++;
      words.push(end === at ? `${numbers[at]}` : `${numbers[at]}${end - at > 1 ? dash : ","}${numbers[end]}`);
      at = end + 1;
    }
    return words.length > most ? `${words.slice(0, most).join(",")} … (${plain(numbers.length)})` : words.join(",");
  };
  const shapeText = (dims) => `[${dims.join(", ")}]`;
  // Marks that a terminal obeys, and bytes that are no text, are typed as escapes.
  const escaped = (c) => { const code = c.charCodeAt(0); return code < 128 || code >= 0xdc80 && code < 0xdd00 ? `\\x${(code & 255).toString(16).padStart(2, "0")}` : clean(c); };
  const quote = (word) => {
    if (/^[\w@%+=:,./-]+$/.test(word)) return word;
    return word.search(HIDDEN) < 0 ? `'${word.replaceAll("'", "'\"'\"'")}'` : `$'${word.replace(/[\\']/g, "\\$&").replace(HIDDEN, escaped)}'`;
  };
  const breaks = (text) => text.split(/(?<=[._/])/).flatMap((part) => [part, el("wbr")]);
  // A path, shortened in the middle where it has no room.
  const pathText = (path) => {
    const text = clean(path), end = Math.max(0, text.lastIndexOf("/", text.length - 12));
    return el("span", { class: "path", title: text }, end ? span("start", text.slice(0, end)) : null, el("span", { class: end ? "end" : "start" }, text.slice(end)));
  };

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

  // The tensors, in the natural order of their names.
  const parts = [];
  {
    const shared = repeated(data.names.shared);
    let last = [];
    data.names.rest.forEach((rest, p) => { last = last.slice(0, shared[p]).concat(rest.split(".")); parts.push(last); });
  }
  const names = parts.map((each) => each.join("."));
  const count = names.length;
  const types = data.types.map(([dtype, shapes, full, stored, held, kind]) => ({ dtype, shapes, full, stored, held, kind, size: full ?? stored }));
  const typeOf = (p) => types[data.parameters.type[p]];
  const layoutOf = (p) => data.layouts[data.parameters.layout[p]] || null;
  const unit = data.unit;
  const places = (numbers) => `${unit}${numbers.length === 1 ? "" : "s"} ${ranges(numbers)}`;
  const filesOf = (found) => ({ ...found, bytes: repeated(found.bytes), state: repeated(found.state), same: found.same && repeated(found.same) });
  const files = filesOf(data.files);
  const fileAt = new Map(files.number.map((value, at) => [value, at]));
  const aliases = new Map(data.files.aliases);
  const fileNumber = (holder) => aliases.get(holder) ?? holder;
  const fileNumbers = (holders) => [...new Set(holders.map(fileNumber))].sort((a, b) => a - b);
  const pathOf = (holder) => files.path[fileAt.get(fileNumber(holder))] ?? null;
  const cluster = data.cluster;
  const stages = cluster ? cluster.stages : [];
  const stageOf = (rank) => stages.findIndex(([first, devices]) => rank >= first && rank < first + devices);
  const axesText = (each) => (each && each.axes ? each.axes.map(([name, size]) => `${name} ${size}`).join(" × ") : "");
  const axis = (name) => (cluster && cluster.axes ? (cluster.axes.find((each) => each[0] === name) || [name, 1])[1] : 1);

  // Slices.
  const slicesOf = (sharding) => {
    if (!sharding.slices) {
      const { holders } = sharding;
      if (holders.lists) sharding.slices = holders.lists;
      else {
        const flat = strided(holders.strides);
        sharding.slices = [];
        for (let at = 0; at < flat.length; at += holders.copies) sharding.slices.push(flat.slice(at, at + holders.copies));
      }
      sharding.lacking = new Set(sharding.absent);
      sharding.copies = largest(sharding.slices.map((each) => each.length));
    }
    return sharding.slices;
  };
  const stateOf = (sharding, slice) => {
    const holders = slicesOf(sharding)[slice];
    const live = holders.filter((file) => !sharding.lacking.has(file)).length;
    return !live ? "lost" : live < holders.length ? "part" : "held";
  };
  const cutText = (layout) => {
    if (!layout) return "";
    const [{ cuts }] = layout.shardings;
    slicesOf(layout.shardings[0]);
    const { copies } = layout.shardings[0];
    const cut = cuts.filter((n) => n > 1).length ? cuts.join(" × ") : unit === "rank" ? "whole" : "";
    return [cut, copies > 1 ? `${copies} copies` : ""].filter(Boolean).join(", ");
  };
  // Layouts that look the same to a reader: files may differ where ranks do not.
  const classes = new Map();
  const looks = data.layouts.map((layout) => {
    const about = layout.shardings.map((sharding) => {
      const slices = slicesOf(sharding);
      const stage = unit === "rank" && slices.length && slices[0].length ? stageOf(slices[0][0]) : 0;
      const lost = sharding.absent.length ? slices.some((_, slice) => stateOf(sharding, slice) === "lost") : false;
      layout.stage = stage;
      layout.lost = layout.lost || lost;
      return [sharding.cuts, sharding.copies, stage, lost, sharding.absent.length > 0];
    });
    const key = JSON.stringify(about);
    if (!classes.has(key)) classes.set(key, classes.size);
    return classes.get(key);
  });
  const cutTexts = data.layouts.map(cutText);

  // Places in files: per structure, from parameter to offset and size.
  const structureOf = new Map();
  const structures = data.structures;
  if (structures) structures.files.forEach((found, at) => { for (const file of Array.isArray(found) ? strided(found) : found.list) structureOf.set(file, at); });
  const read = new Map();
  const structure = (at) => {
    if (!read.has(at)) {
      const found = new Map();
      const [steps, gaps, sizes] = ["parameters", "gaps", "bytes"].map((key) => repeated(structures[key][at]));
      let parameter = 0, end = 0;
      steps.forEach((step, n) => { parameter += step; found.set(parameter, [end + gaps[n], sizes[n]]); end += gaps[n] + sizes[n]; });
      read.set(at, found);
    }
    return read.get(at);
  };
  const placeIn = (file, p) => { const at = structureOf.get(file); return at === undefined ? null : structure(at).get(p) ?? null; };

  // What a name says: layer, part of the model, packing.
  const layers = new Float64Array(count).fill(-1), seriesOf = new Int32Array(count).fill(-1);
  const series = [];
  const seriesAt = new Map();
  const LAYER = new Set(["layers", "blocks", "h", "layer", "block"]);
  const sizes = new Float64Array(count), kinds = new Array(count), partOf = new Array(count);
  const SCALE = /(^|[._])(weight_scale_inv|weight_scale|weight_scales|input_scale|scales|scale_inv|scale|weight_shape|weight_zero_point)$/;
  const PARTS = [["scales", SCALE], ["experts", /experts?(\.|_|\b)/], ["router", /router|(^|\.)gate\.|gating/], ["norms", /norm|(^|\.)ln_/],
    ["embeddings", /embed|wte|wpe|tok_/], ["head", /(^|\.)(lm_head|head|output_layer)\./], ["attention", /att|(^|[._])(qkv|q_proj|k_proj|v_proj|o_proj|wq|wk|wv|wo)/],
    ["MLP", /mlp|ffn|feed_forward|(^|[._])(w1|w2|w3|fc1|fc2|gate_proj|up_proj|down_proj)/]];
  const partsOfText = new Map();
  const partNamed = (name) => {
    const text = name.replace(/\d+/g, "");
    if (!partsOfText.has(text)) partsOfText.set(text, (PARTS.find(([, pattern]) => pattern.test(text)) || ["other"])[0]);
    return partsOfText.get(text);
  };
  const KINDS = { "optimizer state": "moments", "accumulated gradients": "gradients", other: "other values" };
  // Packed types count their elements.
  const elementsOf = (p) => {
    const { dtype, kind, shapes } = typeOf(p);
    if (kind !== "weights" || partOf[p] === "scales" || !shapes.length) return 0;
    const packed = names[p].endsWith("_packed") ? (dtype === "Int32" ? 8 : 2) : names[p].endsWith("_blocks") && dtype === "UInt8" ? 2 : 1;
    return product(shapes[0]) * packed;
  };
  // Without a layout, shapes are those of slices.
  const wholeShapes = types.every((type) => type.full !== null || type.kind !== "weights");
  let parameters = 0, predicted = 0;
  for (let p = 0; p < count; p++) {
    const type = typeOf(p), name = names[p], own = parts[p];
    sizes[p] = type.size || 0;
    partOf[p] = partNamed(name);
    kinds[p] = KINDS[type.kind] || type.kind;
    if (/(^|\.)(fp32_param|master|optimizer\.state\.param)\b/.test(name) && kinds[p] === "moments") kinds[p] = "masters";
    for (let at = 0; at + 1 < own.length; at++) {
      if (LAYER.has(own[at]) && number.test(own[at + 1])) {
        const prefix = own.slice(0, at + 1).join(".");
        // State of a layer belongs to the layer.
        const key = prefix.replace(/^(adam_[mv]|moments?|moment[12]|accu_grads|accum|exp_avg|exp_avg_sq|fp32_param|optimizer\.state\.[a-z0-9_]+)\./, "");
        if (!seriesAt.has(key)) { seriesAt.set(key, series.length); series.push({ prefix: key, bytes: 0, layers: new Map() }); }
        seriesOf[p] = seriesAt.get(key);
        layers[p] = Number(own[at + 1]);
        break;
      }
    }
    if (data.prediction && layers[p] >= data.prediction[0] && layers[p] < data.prediction[0] + data.prediction[1]) predicted += elementsOf(p);
    else parameters += elementsOf(p);
  }
  const result = compared ? repeated(compared.result) : null;
  const RESULTS = [compared && !compared.values ? "same" : "equal", "differs", "other type", "only in A", "only in B"];
  const differing = new Map((compared ? compared.differing : []).map((row) => [row[0], row]));
  const indexOf = new Map(names.map((name, p) => [name, p]));
  const statistics = new Map((data.statistics || []).map((row) => [indexOf.get(row[0]), row]));

  // Filters: one byte a tensor and two prefix sums, so that any group is two subtractions.
  const filters = new Map();
  const mask = new Uint8Array(count), counts = new Uint32Array(count + 1), totals = new Float64Array(count + 1);
  let words = [], version = 0, lowered = null;
  const globOf = (text) => new RegExp(`^${text.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`, "m");
  const listeners = [];
  const apply = () => {
    version++;
    if (words.length && !lowered) lowered = names.map((name) => { const low = name.toLowerCase(), seen = clean(name).toLowerCase(); return low === seen ? low : `${low}\n${seen}`; });
    const globs = words.filter((word) => word.includes("*")).map(globOf), texts = words.filter((word) => !word.includes("*"));
    const tests = [...filters.values()].map((filter) => filter.test);
    for (let p = 0; p < count; p++) {
      let kept = 1;
      for (const text of texts) if (!lowered[p].includes(text)) { kept = 0; break; }
      if (kept) for (const glob of globs) if (!glob.test(lowered[p])) { kept = 0; break; }
      if (kept) for (const test of tests) if (!test(p)) { kept = 0; break; }
      mask[p] = kept;
      counts[p + 1] = counts[p] + kept;
      totals[p + 1] = totals[p] + (kept ? sizes[p] : 0);
    }
    listeners.forEach((listener) => listener());
  };
  const filtered = () => words.length > 0 || filters.size > 0;
  const toggle = (key, value, text, test) => {
    if (filters.get(key)?.value === value) filters.delete(key); else filters.set(key, { value, text, test });
    apply();
  };
  const clearAll = () => { filters.clear(); words = []; search.value = ""; apply(); };

  // Keyboard on a picture of cells.
  const redraws = [];
  const keysOf = (moves) => (event) => {
    const move = moves[event.key];
    // Buttons in a list take their own keys.
    if (!move || event.target !== event.currentTarget) return;
    event.preventDefault();
    move(event);
  };
  const copyable = (texts) => {
    const text = texts.join(" ");
    const copy = button({
      class: "copy", onclick: async () => {
        try { await navigator.clipboard.writeText(text); } catch {
          const area = el("textarea", {}, text);
          document.body.append(area);
          area.select();
          document.execCommand("copy");
          area.remove();
        }
        copy.textContent = "Copied";
        setTimeout(() => { copy.textContent = "Copy"; }, 1200);
      },
    }, "Copy");
    return div("command", el("code", {}, texts.flatMap((word) => [span("word", breaks(clean(word))), " "])), copy);
  };
  const table = (columns, rows) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": columns.map((column) => column[0]).join(", ") }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map(([title, numeric]) => el("th", { class: numeric ? "n" : null, scope: "col" }, title)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, n) => el("td", { class: columns[n][1] ? "n" : null }, cell)))))));
  const fact = (label, value, small, soft, title, mark) => el("div", { class: "fact", title }, div("label", mark, label),
    div("figure", value, small ? span("unit", small) : null), div("soft", soft));

  // Head and problems.
  const state = span(`state ${data.complete === true ? "ok" : data.complete === false ? "bad" : ""}`, el("i", { class: "dot", "aria-hidden": "true" }), clean(data.state));
  const dot = () => el("span", { class: "sep", "aria-hidden": "true" }, "·");
  const about = [data.form_words, data.architecture, data.step === null ? null : `step ${data.step}${data.steps.length > 1 ? ` (${data.newest ? "newest of" : "one of"} ${data.steps.length})` : ""}`].filter(Boolean).map(clean);
  const sides = () => el("table", { class: "sides" }, el("tbody", {}, compared.sides.map((side, n) => el("tr", {}, el("th", { class: "AB"[n], scope: "row" }, "AB"[n]),
    el("td", { class: "mono" }, clean(side.path)), [side.form, side.step === null ? "" : `step ${side.step}`, axesText(side.cluster), side.count, bytes(side.total), side.state].map((text) => el("td", {}, clean(text)))))));
  const header = el("header", {}, el("h1", {}, compared ? compared.titles.map((title, n) => [n ? span("and", " and ") : null, breaks(clean(title))]) : breaks(clean(data.title))),
    compared ? sides() : div("under", el("p", { id: "summary" }, about.flatMap((text) => [text, dot()]), state), paragraph("mono", pathText(data.source))));
  const LEVELS = ["Problem", "Not certain", "Note"];
  const hint = (text) => {
    const [, words_, command] = text.match(/^(?:([^]*): )?(reshard [^]*)$/) || [null, text];
    return [words_ ? paragraph("hint text", words_) : null, command ? copyable([command]) : null];
  };
  const problem = (each) => el("li", { class: `l${each.level}` }, el("strong", {}, LEVELS[each.level]), span("text", lines(each.text)),
    each.hint ? hint(lines(each.hint)) : null);
  const problems = () => {
    if (!data.problems.length) return null;
    const rest = data.problems.slice(3);
    const list = el("ul", { class: "problems" }, data.problems.slice(0, 3).map(problem));
    const more = rest.length ? button({ class: "more", onclick: () => { more.replaceWith(el("ul", { class: "problems rest", tabindex: 0, "aria-label": "More problems" }, rest.map(problem))); },
    }, `and ${plain(rest.length)} more`) : null;
    return el("section", { id: "problems", "aria-label": "Problems" }, list, more);
  };

  // Facts.
  const onDisk = sum(files.bytes), present = files.state.filter((each) => each !== "missing").length;
  const byType = new Map();
  for (let p = 0; p < count; p++) byType.set(typeOf(p).dtype, (byType.get(typeOf(p).dtype) || 0) + sizes[p]);
  const allBytes = sum([...byType.values()]);
  const weights = sizes.reduce((total, size, p) => total + (kinds[p] === "weights" ? size : 0), 0);
  const SHORT = { Float8E4M3FN: "FP8", Float8E5M2: "FP8", BFloat16: "BF16", Float16: "FP16", Float32: "FP32", Float64: "FP64", Int8: "INT8", Int32: "INT32", UInt8: "UINT8" };
  const hasState = kinds.some((kind) => kind === "moments" || kind === "masters");
  const skeletons = new Map();
  const patternOf = new Array(count);
  for (let p = 0; p < count; p++) {
    const key = `${parts[p].map((part) => (number.test(part) ? "\u0001" : part)).join(".")}\u0002${data.parameters.type[p]}\u0002${looks[data.parameters.layout[p]] ?? -1}\u0002${result ? result[p] : ""}`;
    let found = skeletons.get(key);
    if (!found) skeletons.set(key, found = []);
    found.push(p);
    patternOf[p] = found;
  }
  const factsOf = () => {
    const main = series.slice().sort((a, b) => b.bytes - a.bytes)[0];
    const layersIn = main ? [...main.layers.keys()] : [];
    const extra = data.prediction ? layersIn.filter((layer) => layer >= data.prediction[0]).length : 0;
    const [amount, scale] = thousands(parameters);
    const [disk, diskUnit] = binary(onDisk);
    const [top, topBytes] = [...byType].sort((a, b) => b[1] - a[1])[0] || ["", 0];
    const trained = kinds.filter((kind) => kind === "weights").length;
    const stageWords = stages.length > 1 ? plural(stages.length, "stage") : "";
    return el("div", { class: "facts", id: "facts" },
      parameters && wholeShapes ? fact("Parameters", amount, scale, predicted ? `+ ${thousands(predicted).join(" ")} in the prediction layer` : `${plain(parameters)} elements`, `${plain(parameters)} elements`) : null,
      fact("On disk", disk, diskUnit, `in ${plural(present, unit === "rank" ? "rank file" : "file")}`, `${plain(onDisk)} bytes`),
      fact("Tensors", plain(count), "", hasState ? `${plural(trained, "weight")} and their state` : `${plural(skeletons.size, "pattern")} of names`),
      main ? fact("Layers", extra ? `${layersIn.length - extra} + ${extra}` : plain(layersIn.length), "", extra ? "last: multi-token prediction" : stageWords || clean(shortened(main.prefix, 40))) : null,
      cluster ? fact("Ranks", plain(cluster.ranks), "", axesText(cluster) || stageWords) : null,
      hasState && weights ? fact("Weights", ...binary(weights), `${share(weights, allBytes)} of the bytes`, `${plain(weights)} bytes`)
        : topBytes ? fact("Type", SHORT[top] || clean(top), "", `${share(topBytes, allBytes)} of the bytes`, clean(top)) : null);
  };
  const listed = (numbers) => {
    const kinds_ = [...new Set(numbers.map((p) => kinds[p]))];
    if (!kinds_.includes("weights")) return `${kinds_.join(", ")}, ${bytes(sum(numbers.map((p) => sizes[p])))}`;
    const found = [...new Set(numbers.map((p) => (layers[p] >= 0 ? partOf[p] : shortened(clean(names[p]), 30))))]; return found.slice(0, 3).join(", ") + (found.length > 3 ? " …" : "");
  };
  const differences = () => el("div", { class: "facts alone", id: "facts" }, RESULTS.map((word, code) => {
    const found = [];
    for (let p = 0; p < count; p++) if (result[p] === code) found.push(p);
    const both = result.filter((each) => each < 3).length;
    const title = code ? word[0].toUpperCase() + word.slice(1) : compared.values ? "Equal in bytes" : "Same type and shape";
    return button({ class: "fact", "aria-pressed": "false", "data-code": code, disabled: found.length ? null : "", onclick: () => toggle("result", code, word, (p) => result[p] === code) },
      div("label", el("i", { class: `key r${code}` }), code === 2 ? "Other type or shape" : title), div("figure", plain(found.length)),
      div("soft", code ? found.length ? listed(found) : "none" : `of ${plural(both, "tensor")} in both`));
  }));

  // What it is made of: stacked bars, each part a filter.
  const SHADES = ["b5", "b3", "b2", "b1", "grey"];
  const bar = (title, valueOf, order) => {
    const found = new Map();
    for (let p = 0; p < count; p++) { const value = valueOf(p); found.set(value, (found.get(value) || 0) + sizes[p]); }
    let entries = [...found].filter(([, size]) => size).sort(order ? (a, b) => order.indexOf(a[0]) - order.indexOf(b[0]) : (a, b) => b[1] - a[1]);
    if (entries.length < 2 || (found.get("other") || 0) > allBytes / 3) return null;
    const small = entries.filter(([, size], n) => n > 2 && (size < allBytes * 0.0005 || n > 4));
    entries = entries.filter((entry) => !small.includes(entry));
    const press = (value) => ({ type: "button", "data-filter": title, "data-value": value, "aria-pressed": "false", onclick: () => toggle(title, value, value, (p) => valueOf(p) === value) });
    const segments = entries.map(([value, size], n) => { const made = el("button", { ...press(value), class: `segment ${SHADES[Math.min(n, 4)]}`, tabindex: -1, "aria-label": clean(value), title: `${clean(value)} ${bytes(size)}` }); made.style.flexGrow = size / allBytes; return made; });
    return div("made", div("label", title), div(null, div("bar", segments),
      div("legend", entries.map(([value, size], n) => el("button", press(value), el("i", { class: `key ${SHADES[Math.min(n, 4)]}` }), clean(value), span("soft", `${bytes(size)} · ${share(size, allBytes)}`))),
        small.length ? el("span", { class: "soft", title: small.map(([value, size]) => `${clean(value)} ${bytes(size)}`).join("\n") }, `${small.length} more`) : null)));
  };
  const made = () => {
    const bars = [bar("Type", (p) => typeOf(p).dtype), bar("Kind", (p) => kinds[p], ["weights", "masters", "moments", "gradients", "other values"]), bar("Part", (p) => partOf[p]),
      bar("Cut", (p) => cutTexts[data.parameters.layout[p]] || "whole")].filter(Boolean);
    return bars.length ? div(null, el("h2", {}, "What it is made of"), bars) : null;
  };
  const pressed = () => document.querySelectorAll("[data-filter]").forEach((each) => {
    const filter = filters.get(each.dataset.filter);
    each.setAttribute("aria-pressed", filter?.value === each.dataset.value);
    each.classList.toggle("faded", Boolean(filter) && filter.value !== each.dataset.value);
  });
  listeners.push(pressed, () => document.querySelectorAll("[data-code]").forEach((each) => each.setAttribute("aria-pressed", filters.get("result")?.value === Number(each.dataset.code))));

  // How it is cut: a cell a rank, or a file.
  const inFile = (numbers, text) => {
    const held = new Set(), wanted = new Set(numbers);
    for (const [holder, at] of structureOf) if (wanted.has(fileNumber(holder))) for (const p of structure(at).keys()) held.add(p);
    if (structureOf.size) toggle("file", text, text, (p) => held.has(p));
  };
  const grid = (cells, across, size, label, group) => {
    const gap = size > 8 ? 2 : 1, width = across * (size + gap) - gap, rows = Math.ceil(cells.length / across), tall = size === 34 ? 28 : size;
    let active = 0;
    const rects = cells.map((cell, at) => {
      const x = (at % across) * (size + gap), y = Math.floor(at / across) * (tall + gap);
      return svg("g", { class: `cell ${cell.kind}`, "data-rank": cell.numbers.join(" ") }, svg("rect", { x: x + 0.5, y: y + 0.5, width: size - 1, height: tall - 1, rx: 2 }),
        size === 34 ? svg("text", { x: x + size / 2, y: y + tall / 2 + 4 }, String(cell.numbers[0])) : null, svg("title", {}, cell.title));
    });
    const said = el("p", { class: "soft said", role: "status" });
    const go = (at) => { active = Math.max(0, Math.min(cells.length - 1, at)); rects.forEach((rect, n) => rect.classList.toggle("active", n === active)); said.textContent = cells[active].title; };
    const picture = svg("svg", {
      class: "cells", ...scalable(width, rows * (tall + gap)), tabindex: 0, role: "application", "aria-label": `${label}. Arrow keys move, Enter filters.`,
      onclick: (event) => { const at = rects.indexOf(event.target.closest("g")); if (at >= 0) { go(at); inFile(cells[at].numbers, cells[at].name); } },
      onkeydown: keysOf({ ArrowRight: () => go(active + 1), ArrowLeft: () => go(active - 1), ArrowDown: () => go(active + across), ArrowUp: () => go(active - across), Enter: () => inFile(cells[active].numbers, cells[active].name) }),
    }, rects);
    return el("div", { class: group ? "block" : "" }, group, picture, said);
  };
  const cut = () => {
    const total = files.number.length;
    const cellOf = (numbers, kind) => {
      const at = numbers.map((number) => fileAt.get(number)), size = sum(at.map((each) => files.bytes[each] || 0));
      const missing = at.some((each) => each === undefined || files.state[each] !== "ok");
      const name = `${unit} ${numbers.length > 1 ? `${numbers[0]}–${numbers[numbers.length - 1]}` : numbers[0]}`;
      const path = numbers.length === 1 && at[0] !== undefined ? files.path[at[0]] : null;
      return { numbers, name, kind: missing ? "lost" : kind, title: `${name}: ${missing ? "missing or damaged" : `${path === null ? "" : `${clean(path)}, `}${bytes(size)}`}` };
    };
    if (cluster && unit === "rank" && cluster.ranks === total) {
      const mp = axis("mp"), whole = Math.max(1, Math.ceil(cluster.ranks / 1024));
      const each = cluster.ranks > 1024 ? 8 ** Math.ceil(Math.log(whole) / Math.log(8)) : 1;
      const size = cluster.ranks <= 64 ? 34 : 7;
      let wrapped = false;
      const blocks = stages.map(([first, devices], number) => {
        const cells = [];
        for (let rank = first; rank < first + devices; rank += each) cells.push(cellOf(Array.from({ length: Math.min(each, first + devices - rank) }, (_, n) => rank + n), number % 2 ? "t" : "b"));
        let across = each > 1 ? Math.min(16, cells.length) : cluster.axes && mp > 1 ? mp : Math.min(devices, size === 34 ? 8 : 16);
        // A stage of hundreds of ranks is a block of its own, not a column.
        while (cells.length > across * 20 && across < 48) across *= 2;
        wrapped ||= each === 1 && across > mp;
        const found = series.length ? [...new Set([...layers.keys()].filter((p) => layers[p] >= 0 && layoutOf(p)?.stage === number).map((p) => layers[p]))].sort((a, b) => a - b) : [];
        const title = stages.length > 1 ? paragraph("soft", el("i", { class: `key ${number % 2 ? "t2" : "b2"}` }), `stage ${number}${found.length && stages.length <= 8 ? `: layers ${ranges(found, 3)}` : ""}`) : null;
        return grid(cells, across, size, `Ranks of stage ${number}`, title);
      });
      const most = (kind) => { const found = new Map(); for (let p = 0; p < count; p++) if (kinds[p] === kind && layoutOf(p)) found.set(data.parameters.layout[p], (found.get(data.parameters.layout[p]) || 0) + sizes[p]); const best = [...found].sort((a, b) => b[1] - a[1])[0]; return best ? data.layouts[best[0]] : null; };
      const of = most("weights"), moments = most("moments"), dp = axis("dp");
      const sentence = [each > 1 ? `One cell is ${each} ranks.` : `One cell is a rank${mp === 1 ? "" : wrapped ? `, mp ${mp} side by side` : `: mp ${mp} across${dp > 1 ? `, dp ${dp} down` : ""}`}.`,
        of ? of.shardings[0].copies > 1 ? `Weights: ${of.shardings[0].copies} copies${dp === of.shardings[0].copies ? " on dp" : ""}.` : "Weights: each slice once." : "",
        moments && of && moments.shardings[0].copies < of.shardings[0].copies ? `Moments: each of these slices cut in ${of.shardings[0].copies / Math.max(1, moments.shardings[0].copies)} over dp.` : "", "Outlined: holders of the selected slice."].filter(Boolean).join(" ");
      return el("div", { id: "cut" }, el("h2", {}, "How it is cut"), div(`blocks${stages.length > 8 ? " many" : ""}`, blocks), paragraph("soft", sentence));
    }
    const each = Math.ceil(total / 600), cells = [], most_ = largest(files.bytes);
    for (let at = 0; at < total; at += each) {
      const numbers = files.number.slice(at, at + each).filter((number) => number !== null);
      if (numbers.length) cells.push(cellOf(numbers, files.bytes[at] < most_ / 2 ? "pale" : "b"));
    }
    if (!cells.length) return null;
    const smallest = files.bytes.reduce((least, size, at) => (files.state[at] === "ok" ? Math.min(least, size) : least), Infinity);
    const whole = data.layouts.length && data.layouts.every((layout) => layout.shardings[0].cuts.every((n) => n === 1)) ? "Tensors are whole. " : "";
    const said = total > 1 && Number.isFinite(smallest) ? `The largest file has ${bytes(most_)}, the smallest ${bytes(smallest)}.` : "";
    return el("div", { id: "cut" }, el("h2", {}, `Stored in ${plural(total, "file")}`), grid(cells, Math.min(48, cells.length), 14, `Files${each > 1 ? `, ${each} a cell` : ""}`), paragraph("soft", whole + said));
  };
  const outline = (numbers) => {
    const held = new Set(numbers.map(String));
    document.querySelectorAll("#cut g.cell").forEach((each) => each.classList.toggle("held", each.dataset.rank.split(" ").some((rank) => held.has(rank))));
  };

  // Layers: bytes of each.
  for (let p = 0; p < count; p++) if (seriesOf[p] >= 0) {
    const each = series[seriesOf[p]];
    if (result && result[p] > 2) continue;
    each.bytes += sizes[p];
    const layer = each.layers.get(layers[p]) || { bytes: 0, differ: 0, tensors: 0, elements: 0, stage: layoutOf(p)?.stage ?? 0 };
    layer.bytes += sizes[p];
    layer.tensors++;
    if (result && result[p] > 0) layer.differ += sizes[p];
    layer.elements += elementsOf(p);
    each.layers.set(layers[p], layer);
  }
  const strip = (each, number) => {
    const numbers = [...each.layers.keys()].sort((a, b) => a - b), group = Math.ceil(numbers.length / 200);
    const cells = [];
    for (let at = 0; at < numbers.length; at += group) {
      const inside = numbers.slice(at, at + group).map((layer) => each.layers.get(layer));
      cells.push({ first: numbers[at], last: numbers[Math.min(at + group, numbers.length) - 1], bytes: sum(inside.map((layer) => layer.bytes)), differ: sum(inside.map((layer) => layer.differ)),
        tensors: sum(inside.map((layer) => layer.tensors)), elements: sum(inside.map((layer) => layer.elements)), stage: inside[0].stage });
    }
    const high = largest(cells.map((cell) => cell.bytes)), key = `layers${number}`;
    const usual = [...cells].sort((a, b) => a.bytes - b.bytes)[cells.length >> 1].bytes;
    const outside = sizes.reduce((total, size, p) => total + (layers[p] < 0 ? size : 0), 0);
    const resting = compared ? "" : `most layers ${bytes(usual)}; outside the layers ${bytes(outside)}`;
    const said = el("span", { class: "soft", role: "status" }, resting);
    let active = 0, anchor = 0, dragged = null;
    const choose = (from, to, again) => {
      const [low, top] = [cells[Math.min(from, to)].first, cells[Math.max(from, to)].last], text = `layers ${low === top ? low : `${low}–${top}`}`;
      if (again && filters.get(key)?.value === text) filters.delete(key);
      else filters.set(key, { value: text, text, low, top, test: (p) => seriesOf[p] === seriesAt.get(each.prefix) && layers[p] >= low && layers[p] <= top });
      apply();
    };
    const tell = (at) => {
      active = Math.max(0, Math.min(cells.length - 1, at));
      const cell = cells[active];
      said.textContent = `layer${cell.first === cell.last ? "" : "s"} ${ranges([cell.first, ...(cell.last > cell.first ? [cell.last] : [])]).replace(",", "–")}: ${bytes(cell.bytes)}, ${plural(cell.tensors, "tensor")}${wholeShapes ? `, ${thousands(cell.elements).join(" ")} parameters` : ""}${stages.length > 1 ? `, stage ${cell.stage}` : ""}`;
    };
    const host = el("div", {
      class: "strip", tabindex: 0, role: "application", "aria-label": `Layers ${clean(each.prefix)}. Arrow keys choose a layer, with Shift a range.`,
      onkeydown: keysOf({ ArrowRight: (event) => step(1, event), ArrowLeft: (event) => step(-1, event), Enter: () => choose(active, active, true), Escape: () => { filters.delete(key); apply(); } }),
      onpointerdown: (event) => { const at = under(event); if (at === null || event.button) return; dragged = at; if (event.shiftKey) choose(anchor, at); else { anchor = at; choose(at, at, true); } },
      onpointermove: (event) => { const at = under(event); if (at === null) return; tell(at); if (dragged !== null && at !== dragged) { dragged = at; choose(anchor, at); } },
      onpointerleave: () => { said.textContent = resting; },
    });
    addEventListener("pointerup", () => { dragged = null; });
    const step = (by, event) => { tell(active + by); if (event.shiftKey) choose(anchor, active); else { anchor = active; choose(active, active); } };
    let edges = [];
    const under = (event) => { const x = event.clientX - host.getBoundingClientRect().left; const at = edges.findIndex(([from, to]) => x >= from - 2 && x < to + 2); return at < 0 ? null : at; };
    const draw = () => {
      const width = host.clientWidth || 800, gap = stages.length > 4 ? 3 : 6, chosen = filters.get(key);
      const breaksAt = (at) => at > 0 && ((stages.length > 1 && cells[at].stage !== cells[at - 1].stage) ? gap : data.prediction && cells[at].first === data.prediction[0] ? 10 : 0);
      const room = width - sum(cells.map((_, at) => breaksAt(at))), wide = room / cells.length, thin = wide > 6 ? 2 : wide > 3 ? 1 : 0;
      let x = 0;
      edges = [];
      const shapes = [];
      const tick = [1, 4, 10, 20, 50, 100].find((each) => each * wide / group > 60) || 200;
      cells.forEach((cell, at) => {
        x += breaksAt(at);
        const tall = Math.max(2, 64 * cell.bytes / high), shade = stages.length > 1 && stages.length <= 4 && cell.stage % 2 ? "t" : "b";
        const faded = chosen && (cell.last < chosen.low || cell.first > chosen.top);
        const differs = compared ? Math.max(cell.differ ? 0.08 : 0, cell.differ / cell.bytes) * 64 : 0;
        shapes.push(svg("g", { class: faded ? "faded" : null }, svg("rect", { class: "ground", x, y: 0, width: wide - thin, height: 64 }),
          svg("rect", { class: compared ? "same" : `${shade}2`, x, y: compared ? 0 : 64 - tall, width: wide - thin, height: compared ? 64 : tall }),
          compared ? svg("rect", { class: "differ", x, y: 64 - differs, width: wide - thin, height: differs }) : svg("rect", { class: `${shade}cap`, x, y: 64 - tall, width: wide - thin, height: 2 })));
        if (cell.first % tick === 0 || (data.prediction && cell.last >= data.prediction[0])) shapes.push(svg("text", { x: x + wide / 2, y: 80 }, String(cell.first)));
        edges.push([x, x + wide]);
        x += wide;
      });
      if (stages.length > 1) {
        for (let at = 0; at < cells.length;) {
          let end = at;
          while (end + 1 < cells.length && cells[end + 1].stage === cells[at].stage) end++;
          const { stage } = cells[at];
          shapes.push(svg("rect", { class: stage % 2 && stages.length <= 4 ? "tcap" : "bcap", x: edges[at][0], y: 88, width: edges[end][1] - edges[at][0] - 1, height: 2 }));
          if (stages[stage]) shapes.push(svg("text", { class: "left", x: edges[at][0], y: 104 }, stages.length > 4 ? String(stage) : `stage ${stage} · ranks ${stages[stage][0]}–${stages[stage][0] + stages[stage][1] - 1}`));
          at = end + 1;
        }
      }
      host.replaceChildren(svg("svg", { width, height: stages.length > 1 ? 110 : 86, "aria-hidden": "true" }, shapes));
    };
    listeners.push(draw);
    redraws.push(draw);
    const legend = compared ? span("soft", el("i", { class: "key r0" }), "equal ", el("i", { class: "key r1" }), "differs") : null;
    const title = compared ? "Layers: bytes in both that differ" : "Layers: bytes of each";
    return div(null, div("between", el("h2", {}, title, series.length > 1 ? span("soft", `, ${clean(shortened(each.prefix, 50))}`) : null), el("span", {}, said, legend)), host);
  };
  const layerSection = () => {
    const shown = series.filter((each) => each.bytes >= allBytes * 0.05 && each.layers.size > 1).sort((a, b) => b.bytes - a.bytes).slice(0, 3);
    if (!shown.length) return null;
    if (compared && result.every((code) => code === 0)) return el("section", { id: "layers" }, el("p", {}, `All ${plural(count, "tensor")} are ${compared.values ? "equal" : "of the same type and shape"}.`));
    return el("section", { id: "layers" }, shown.map(strip));
  };

  // A tree by the dots of names, which shows numbered neighbours of equal content as one row.
  const contents = new Map();
  const interned = (key) => { if (!contents.has(key)) contents.set(key, contents.size); return contents.get(key); };
  const severity = (p) => (!result ? 0 : result[p] === 1 ? 2 + (differing.get(p)?.[3] || 0) : result[p] === 0 ? 0 : 1);
  const badStatistics = (p) => { const row = statistics.get(p); return row && row[2] + row[3] ? 1 : 0; };
  const DEEPEST = 200;
  const alone = new Map(types.map(({ dtype }) => [dtype, new Set([dtype])]));
  const build = (first, end, depth, label) => {
    if (end - first === 1 && (parts[first].length === depth || depth > DEEPEST)) {
      const { type, layout } = data.parameters;
      return { label, first, end, kids: null, worst: severity(first) + badStatistics(first), mask: alone.get(typeOf(first).dtype), id: interned(`${type[first]} ${looks[layout[first]] ?? -1} ${result ? result[first] : 0}`) };
    }
    const kids = [];
    for (let at = first; at < end;) {
      const leaf = parts[at].length === depth + 1 || depth === DEEPEST, part = leaf ? parts[at].slice(depth).join(".") : parts[at][depth];
      let to = at + 1;
      if (!leaf) while (to < end && parts[to][depth] === part) to++;
      kids.push(build(at, to, depth + 1, part));
      at = to;
    }
    const mask = kids.every((kid) => kid.mask === kids[0].mask) && kids.length ? kids[0].mask : new Set(kids.flatMap((kid) => [...kid.mask]));
    return { label, first, end, kids, mask, worst: largest(kids.map((kid) => kid.worst)), id: interned(kids.map((kid) => `${kid.label}:${kid.id}`).join("\u0001")) };
  };
  const runEnd = (kids, from) => {
    let to = from + 1;
    if (number.test(kids[from].label)) while (to < kids.length && kids[to].id === kids[from].id && Number(kids[to].label) === Number(kids[to - 1].label) + 1) to++;
    return to - from > 2 ? to : from + 1;
  };
  const rowsIn = (members, level) => {
    const { kids } = members[0], rows = [];
    for (let from = 0; from < kids.length;) {
      const to = runEnd(kids, from);
      let inside = members.flatMap((member) => member.kids.slice(from, to));
      const labels = [{ members: inside, text: to - from > 1 ? null : kids[from].label }];
      // Chains of single children are one row.
      while (inside[0].kids && runEnd(inside[0].kids, 0) === inside[0].kids.length) {
        const single = inside[0].kids.length === 1;
        inside = inside.flatMap((member) => member.kids);
        labels.push({ members: inside, text: single ? inside[0].label : null });
      }
      rows.push({ members: inside, labels, level, leaf: !inside[0].kids, open: false, first: inside[0].first });
      from = to;
    }
    return rows;
  };
  const sumOf = (row, sums) => { let total = 0; for (const { first, end } of row.members) total += sums[end] - sums[first]; return total; };
  const sized = (row) => {
    if (row.version !== version) Object.assign(row, { version, count: sumOf(row, counts), bytes: sumOf(row, totals), text: null });
    return row;
  };
  const labelOf = (row) => {
    if (row.text === null || row.text === undefined) {
      let alike = 0;
      row.text = row.labels.map(({ members, text }) => {
        if (text !== null) return clean(text);
        const found = [...new Set(members.filter(({ first, end }) => counts[end] > counts[first]).map((member) => Number(member.label)))].sort((a, b) => a - b);
        alike = found.length;
        return ranges(found, 6);
      }).join(".");
      row.alike = alike;
    }
    return row.text;
  };
  // A merged tensor opens to its full names.
  const kidsOf = (row) => {
    if (!row.rows) row.rows = row.pattern ? row.pattern.map((p) => nameRow(p, row.level + 1)) : row.leaf ? row.members.map(({ first }) => nameRow(first, row.level + 1)) : rowsIn(row.members, row.level + 1);
    return row.rows;
  };
  const nameRow = (p, level) => ({ members: [{ first: p, end: p + 1 }], level, leaf: true, first: p, name: true, worst: severity(p) + badStatistics(p) });
  const expandable = (row) => !row.name && (!row.leaf || row.members.length > 1 || (row.pattern && row.pattern.length > 1));
  const worstOf = (row) => row.worst ?? row.members[0].worst;
  const view = { mode: "Tree", by: compared ? "result" : "size", down: true, rows: [], active: -1, chosen: -1 };
  const orders = {
    name: (a, b) => b.first - a.first,
    size: (a, b) => sized(b).bytes - sized(a).bytes || a.first - b.first,
    result: (a, b) => worstOf(b) - worstOf(a) || a.first - b.first,
  };
  const inOrder = (rows) => {
    const order = orders[view.by], sign = view.down ? 1 : -1;
    return [...rows].sort((a, b) => (data.statistics ? worstOf(b) - worstOf(a) : 0) || sign * order(a, b));
  };
  const root = build(0, count, 0, "");
  const roots = { Tree: count ? rowsIn([root], 1) : [], Patterns: null, Names: null };
  const patternText = (found) => parts[found[0]].map((part, at) => {
    if (!number.test(part)) return clean(part);
    const numbers = [...new Set(found.map((p) => Number(parts[p][at])))].sort((a, b) => a - b);
    return numbers.length > 1 ? `{${ranges(numbers, 8, "-")}}` : numbers[0];
  }).join(".");
  const top = () => {
    if (view.mode === "Patterns") return roots.Patterns ||= [...skeletons.values()].map((pattern) => ({ pattern, members: pattern.map((p) => ({ first: p, end: p + 1 })), level: 1, leaf: true, first: pattern[0], worst: largest(pattern.map((p) => severity(p) + badStatistics(p))) }));
    if (view.mode === "Names") return roots.Names ||= names.map((_, p) => nameRow(p, 1));
    return roots.Tree;
  };
  const open = () => {
    // The largest groups are opened while few rows show.
    let shown = roots.Tree.length;
    const closed = roots.Tree.filter((row) => !row.leaf);
    while (closed.length) {
      closed.sort((a, b) => worstOf(a) - worstOf(b) || sized(a).bytes - sized(b).bytes);
      const row = closed.pop();
      if (shown + kidsOf(row).length > 19) break;
      row.open = true;
      shown += row.rows.length;
      closed.push(...row.rows.filter((each) => !each.leaf));
    }
  };

  // The list: rows exist only where they are seen.
  const COLUMNS = {
    name: { title: "name", sort: "name" }, size: { title: "size", width: 92, numeric: true, sort: "size" }, bar: { title: "", width: 118 }, tensors: { title: "tensors", width: 78, numeric: true },
    type: { title: "type", width: compared ? 132 : 120 }, shape: { title: "shape", width: 124 }, cut: { title: "cut", width: 136 }, bad: { title: "NaN+Inf", width: 84, numeric: true }, min: { title: "min", width: 84, numeric: true },
    max: { title: "max", width: 84, numeric: true }, norm: { title: "norm", width: 84, numeric: true }, result: { title: "result", width: 98, sort: "result" }, elements: { title: "elements", width: 78, numeric: true },
    largest: { title: "largest", width: 78, numeric: true }, relative: { title: "relative", width: 92, numeric: true },
  };
  // Columns go as the list narrows, so that names keep their room.
  const COLUMN_ORDER = compared ? ["name", "result", "type", "shape", "elements", "largest", "relative"]
    : ["name", "bar", "size", "tensors", "type", "shape", "cut", ...(data.statistics ? ["bad", "min", "max", "norm"] : [])];
  const DROPPED = compared ? ["largest", "elements", "shape", "type", "relative"] : ["bar", "tensors", "cut", "type", "norm", "max", "min", "shape", "bad"];
  const columnsFor = (width) => {
    const hidden = new Set([view.mode !== "Tree" && "bar", view.mode === "Names" && "tensors", !cutTexts.some(Boolean) && "cut"]);
    const room = () => width - sum(COLUMN_ORDER.filter((column) => !hidden.has(column)).map((column) => COLUMNS[column].width || 0));
    for (const column of DROPPED) if (room() < (width < 600 ? 170 : view.mode === "Tree" ? 250 : 420)) hidden.add(column);
    return COLUMN_ORDER.filter((column) => !hidden.has(column));
  };
  const short = (value) => (value === null || value === undefined ? "" : typeof value !== "number" ? clean(value) : Math.abs(value) >= 1e7 ? value.toExponential(3) : Number.isInteger(value) || Math.abs(value) >= 1000 ? plain(Math.round(value)) : String(Number(value.toPrecision(4))));
  const marked = (text) => {
    const found = words.filter((word) => !word.includes("*"));
    if (!found.length) return [text];
    const pattern = new RegExp(`(${found.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`, "gi");
    return text.split(pattern).map((part, n) => (n % 2 ? span("hit", part) : part));
  };
  const nameCell = (text) => {
    const whole = shortened(text);
    const at = whole.lastIndexOf(".", whole.lastIndexOf(".") - 1);
    return el("span", { class: "name", title: text }, at > 0 ? [span("start", marked(whole.slice(0, at))), span("end", marked(whole.slice(at)))] : span("start", marked(whole)));
  };
  const barOf = (part) => { const made = span("of", el("i")); made.firstChild.style.width = `${100 * part}%`; return made; };
  const cells = {
    name: (row) => {
      const text = row.name ? clean(names[row.first]) : row.pattern ? patternText(row.pattern.filter((p) => mask[p])) : labelOf(row);
      const alike = row.alike > 1 && !row.leaf ? `${row.alike} alike` : compared && expandable(row) ? plain(row.count) : "";
      return [el("span", { class: `twist${expandable(row) ? isOpen(row) ? " open" : " shut" : ""}`, "aria-hidden": "true" }), nameCell(text || '""'), alike ? span("alike", alike) : null];
    },
    size: (row) => bytes(row.bytes),
    bar: (row) => barOf(row.bytes / (totals[count] || 1)),
    tensors: (row) => (expandable(row) ? plain(row.count) : ""),
    type: (row) => (row.leaf ? typeText(row.first) : row.members[0].mask.size > 1 ? `${row.members[0].mask.size} types` : clean([...row.members[0].mask][0])),
    shape: (row) => (row.leaf ? typeOf(row.first).shapes.slice(0, 2).map(shapeText).join(" ") : ""),
    cut: (row) => (row.leaf ? cutTexts[data.parameters.layout[row.first]] || "" : ""),
    bad: (row) => { const row_ = row.leaf && statistics.get(row.first); return row_ ? el("span", { class: row_[2] + row_[3] ? "bad" : "" }, plain(row_[2] + row_[3])) : ""; },
    min: (row) => short(row.leaf ? statistics.get(row.first)?.[5] : null),
    max: (row) => short(row.leaf ? statistics.get(row.first)?.[6] : null),
    norm: (row) => short(row.leaf ? statistics.get(row.first)?.[8] : null),
    result: (row) => {
      const codes = new Map();
      for (const { first, end } of row.members) for (let p = first; p < end; p++) if (mask[p]) codes.set(result[p], (codes.get(result[p]) || 0) + 1);
      const worst = [1, 2, 3, 4, 0].find((code) => codes.has(code)) ?? 0;
      return span(`r${worst} text`, row.leaf || !worst || codes.size === 1 && worst > 1 ? RESULTS[worst] : worst === 1 ? `${plain(codes.get(1))} differ` : `${plain(codes.get(worst))} ${RESULTS[worst]}`);
    },
    elements: (row) => { const found = row.leaf && differing.get(row.first); return found && found[2] !== null ? share(found[2], found[1]) : ""; },
    largest: (row) => short(row.leaf ? differing.get(row.first)?.[4] : null),
    relative: (row) => { const found = row.leaf && differing.get(row.first); return found ? el("b", { class: "r1 text" }, short(found[3])) : ""; },
  };
  const typeText = (p) => clean(compared && compared.types[p] ? `${typeOf(p).dtype}, ${compared.types[p]}` : typeOf(p).dtype);
  const isOpen = (row) => (row.forced !== undefined && row.forcedAt === version ? row.forced : row.open || (filtered() && !row.leaf && sized(row).count <= 40));
  const body = el("div", { class: "rows", role: "rowgroup" });
  const head = el("div", { class: "head", role: "row" });
  const list = el("div", {
    class: "grid", id: "list", role: "treegrid", tabindex: 0, "aria-label": compared ? "Differences" : "Tensors", onscroll: () => later(),
    onkeydown: keysOf({
      ArrowDown: () => pick(view.active + 1), ArrowUp: () => pick(view.active - 1), Home: () => pick(0), End: () => pick(view.rows.length - 1),
      PageDown: () => pick(view.active + 12), PageUp: () => pick(view.active - 12), ArrowRight: () => fold(view.active, true), ArrowLeft: () => fold(view.active, false), Enter: () => fold(view.active), Escape: () => clearAll(),
    }),
  }, head, body);
  let columns = [], waiting = 0, printing = false;
  // The rows that are seen, and some more; on paper the first 60.
  const seen = (host, total) => (printing ? [0, Math.min(total, 60)] : [Math.max(0, Math.floor(host.scrollTop / ROW) - 8), Math.min(total, Math.ceil((host.scrollTop + (host.clientHeight || 600)) / ROW) + 8)]);
  const later = () => { waiting ||= requestAnimationFrame(() => { waiting = 0; drawRows(); }); };
  const refresh = () => {
    const rows = [];
    const walk = (found) => {
      for (const row of inOrder(found.filter((each) => sized(each).count))) {
        if (rows.length >= MOST_ROWS) return;
        rows.push(row);
        if (expandable(row) && isOpen(row)) walk(kidsOf(row));
      }
    };
    const kept = view.rows[view.active];
    walk(top());
    view.rows = rows;
    view.active = rows.indexOf(kept);
    body.style.height = `${rows.length * ROW}px`;
    list.setAttribute("aria-rowcount", rows.length + 1);
    drawRows();
    const found = counts[count];
    status.replaceChildren(...(filtered() ? [el("b", {}, plural(found, "tensor")), ` of ${plain(count)} · ${bytes(totals[count])} · ${share(totals[count], allBytes)}`] : [`${plural(count, "tensor")} · ${bytes(totals[count])}`]), rows.length < MOST_ROWS ? "" : ` · the first ${plain(MOST_ROWS)} rows`);
    chips.replaceChildren(...[...filters].map(([key, filter]) => button({ class: "chip", "aria-label": `Remove filter ${clean(filter.text)}`, onclick: () => { filters.delete(key); apply(); list.focus(); } }, clean(shortened(filter.text, 40)), el("span", { "aria-hidden": "true" }, " ×"))));
    nothing.hidden = found > 0 || !filtered();
  };
  const drawRows = () => {
    const width = list.clientWidth;
    columns = columnsFor(width);
    const template = columns.map((column) => (COLUMNS[column].width ? `${COLUMNS[column].width}px` : "minmax(170px,1fr)")).join(" ");
    list.style.setProperty("--columns", template);
    const shown = `${columns} ${view.by} ${view.down}`;
    if (head.dataset.shown !== shown) {
      const focused = document.activeElement.dataset.column;
      head.dataset.shown = shown;
      head.replaceChildren(...columns.map((column) => {
        const { title, sort, numeric } = COLUMNS[column], on = sort && view.by === sort;
        return el("div", { role: "columnheader", class: numeric ? "n" : null, "aria-sort": on ? (view.down ? "descending" : "ascending") : null },
          sort ? button({ "data-column": column, class: on ? "on" : null, onclick: () => { view.down = view.by === sort ? !view.down : sort !== "name"; view.by = sort; refresh(); } }, `${title}${on ? view.down ? " ▾" : " ▴" : ""}`) : title);
      }));
      if (focused) head.querySelector(`[data-column=${focused}]`)?.focus();
    }
    const [from, to] = seen(list, view.rows.length);
    body.replaceChildren(...view.rows.slice(from, to).map((row, n) => {
      const index = from + n;
      const line = el("div", {
        class: `row${index === view.active ? " on" : ""}${row.leaf && row.first === view.chosen && index !== view.active ? " chosen" : ""}`, role: "row", id: `row${index}`, "aria-rowindex": index + 2, "aria-level": row.level, "aria-selected": String(index === view.active),
        "aria-expanded": expandable(row) ? String(isOpen(row)) : null, onclick: () => { pick(index); if (expandable(row)) fold(index); },
      }, columns.map((column) => {
        const cell = el("div", { class: `cell${COLUMNS[column].numeric ? " n" : ""}${column === "name" ? " first" : ""}`, role: "gridcell" }, cells[column](sized(row)));
        if (column === "name") cell.style.paddingLeft = `${10 + 14 * (row.level - 1)}px`;
        return cell;
      }));
      line.style.top = `${index * ROW}px`;
      return line;
    }));
    if (view.active >= from && view.active < to) list.setAttribute("aria-activedescendant", `row${view.active}`); else list.removeAttribute("aria-activedescendant");
  };
  const pick = (index) => {
    view.active = Math.max(0, Math.min(view.rows.length - 1, index));
    const y = view.active * ROW, room = list.clientHeight - ROW - 8;
    if (y < list.scrollTop) list.scrollTop = y; else if (y + ROW > list.scrollTop + room) list.scrollTop = y + ROW - room;
    const row = view.rows[view.active];
    if (row && row.leaf) choose(row.pattern ? row.pattern.find((p) => mask[p]) : row.members.find(({ first }) => mask[first]).first);
    drawRows();
  };
  const fold = (index, wanted) => {
    const row = view.rows[index];
    if (!row) return;
    if (!expandable(row) || (wanted === false && !isOpen(row))) {
      // To the parent.
      if (wanted === false) for (let up = index - 1; up >= 0; up--) if (view.rows[up].level < row.level) { pick(up); break; }
      return;
    }
    row.open = row.forced = wanted ?? !isOpen(row);
    row.forcedAt = version;
    refresh();
  };
  const search = el("input", {
    type: "search", id: "search", placeholder: "Search names: experts down_proj, or *.layers.3.*", "aria-label": "Search tensors", autocomplete: "off", spellcheck: "false",
    oninput: () => { words = search.value.toLowerCase().split(/\s+/).filter(Boolean); list.scrollTop = 0; apply(); },
    onkeydown: keysOf({ ArrowDown: () => { list.focus(); pick(Math.max(0, view.active)); }, Escape: () => clearAll() }),
  });
  const status = el("span", { class: "soft", role: "status", id: "matches" }), chips = el("span", { id: "chips" });
  const nothing = el("p", { class: "nothing", hidden: "" }, "No tensor matches. ", button({ onclick: () => clearAll() }, "Clear filters"));
  const modes = ["Tree", "Patterns", "Names"].map((mode) => button({ "aria-pressed": mode === view.mode, onclick: () => { view.mode = mode; view.active = -1; list.scrollTop = 0; modes.forEach((each) => each.setAttribute("aria-pressed", each.textContent === mode)); refresh(); },
  }, mode));
  addEventListener("keydown", (event) => { if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); } });
  listeners.push(refresh);

  // One tensor.
  const inspector = el("aside", { id: "inspector", "aria-label": "The chosen tensor" });
  const facts = (pairs) => el("dl", {}, pairs.filter(([, value]) => value).flatMap(([term, value]) => [el("dt", {}, term), el("dd", { class: "text" }, value)]));
  const SCALES = [["weight", "weight_scale_inv"], ["weight", "weight_scale"], ["weight_packed", "weight_scale"], ["_blocks", "_scales"]];
  const partner = (p) => {
    for (const [one, other] of SCALES) for (const [mine, theirs] of [[one, other], [other, one]]) {
      if (names[p].endsWith(mine)) { const found = indexOf.get(names[p].slice(0, -mine.length) + theirs); if (found !== undefined && found !== p) return [found, theirs]; }
    }
    return null;
  };
  const cutWords = (layout, dims) => {
    const { split, shards } = layout, mp = axis("mp"), dp = axis("dp"), said = [];
    const sharding = layout.shardings[0];
    const agrees = split && split.length === dims.length && split.every((n, d) => n * (d ? 1 : shards) === sharding.cuts[d]);
    if (!agrees) return sharding.cuts.flatMap((n, d) => (n > 1 ? [`dimension ${d} cut ${n}`] : [])).join(", ");
    split.forEach((n, d) => { if (n > 1) said.push(`dimension ${d} ${n === mp ? `over mp ${n}` : `cut ${n}`}`); });
    if (shards > 1) said.push(`dimension 0 ${shards === dp ? `over dp ${shards}` : `cut ${shards} more by optimizer shards`}`);
    return said.join(", ") || (unit === "rank" ? "whole on every rank" : "");
  };
  const choose = (p, keep) => {
    view.chosen = p;
    // Not everywhere has a page an address, and not every name has one.
    if (!keep) try { history.replaceState(null, "", `#${encodeURIComponent(names[p])}`); } catch { /* The choice counts. */ }
    const type = typeOf(p), layout = layoutOf(p), [dims = []] = type.shapes;
    const name = clean(names[p]), dotAt = name.lastIndexOf(".");
    const found = patternOf[p], link = partner(p);
    inspector.replaceChildren(
      el("h3", { id: "chosen", title: name }, breaks(shortened(name.slice(0, dotAt + 1))), el("b", {}, shortened(name.slice(dotAt + 1)))),
      facts([
        ["Type", typeText(p)], ["Shape", `${type.shapes.slice(0, 3).map(shapeText).join(", ")}${layout || type.shapes.length === 1 ? ` = ${plural(product(dims), "element")}` : ""}${compared && compared.shapes[p] ? `; in B ${shapeText(compared.shapes[p])}` : ""}`],
        ["Size", type.size ? `${bytes(type.size)}${type.size >= 1024 ? `, ${plain(type.size)} bytes` : ""}` : null], ["Kind", kinds[p] === "weights" && !hasState ? null : clean(kinds[p])],
        ["Cut", layout ? cutWords(layout, dims) : unit === "rank" && !compared ? "unknown: no strategy" : null], ["Stage", stages.length > 1 && layout && stages[layout.stage] ? `${layout.stage}, ranks ${stages[layout.stage][0]}–${stages[layout.stage][0] + stages[layout.stage][1] - 1}` : null],
        [link && SCALE.test(names[p]) ? "Weight" : "Scales", link ? button({ class: "link", onclick: () => choose(link[0]) }, clean(link[1])) : null],
        ["Alike", found.length > 1 ? [`${plural(found.length, "tensor")}, ${bytes(sum(found.map((each) => sizes[each])))}: `, span("soft", breaks(patternText(found)))] : null],
      ]),
      ...(compared ? [difference(p)] : layout ? layout.shardings.map((sharding, way) => slices(p, sharding, dims, way, layout.shardings.length)) : [stored(p)]),
      ...(statistics.has(p) ? [numbers(statistics.get(p))] : []));
    drawRows();
  };
  const commandOf = (p, box) => {
    const slice = box && box.some(([start, stop], d) => stop - start !== typeOf(p).shapes[0][d]) ? ["--slice", box.map(([start, stop]) => `${start}:${stop}`).join(",")] : [];
    return copyable(["reshard", "get", quote(data.source), quote(names[p]), ...slice, ...data.options.map(quote)]);
  };
  const held = (p, numbers, lacking, whole) => {
    const shown = numbers.slice(0, 8);
    return [table([[unit === "rank" ? "rank" : "number", true], ["file", false], ["offset", true], ["bytes", true]], shown.map((file) => {
      const place = lacking.has(file) ? null : placeIn(file, p), path = pathOf(file);
      return [String(fileNumber(file)), path === null || lacking.has(file) ? span("bad", path === null ? "missing" : "not in it") : pathText(path),
        place ? plain(place[0]) : "", place ? plain(place[1]) : whole ? plain(whole) : ""];
    })), numbers.length > 8 ? paragraph("soft", `and ${plain(numbers.length - 8)} more`) : null];
  };
  const stored = (p) => div(null, el("h4", {}, `In ${plural(typeOf(p).held, "file")}, as each stores it`), commandOf(p, null));
  function slices(p, sharding, dims, way, ways) {
    const all = slicesOf(sharding), { cuts } = sharding, whole = all.length === 1;
    const wide = dims.map((n, d) => [cuts[d], d]).filter(([n]) => n > 1).map(([, d]) => d);
    let [r, c] = wide.length > 1 ? wide : wide.length && wide[0] > 0 ? [wide[0] - 1, wide[0]] : [0, 1];
    if (dims.length < 2) [r, c] = [-1, 0];
    const [tall, broad] = [r < 0 ? 1 : dims[r] || 1, dims.length ? dims[c] || 1 : 1];
    const scale = Math.min(350 / broad, 216 / tall);
    const room = Math.min(350, (inspector.clientWidth || 408) - 58);
    let [width, height] = [Math.max(24, broad * scale), Math.max(24, tall * scale)];
    if (width > room) width = room;
    const [rows, across] = [r < 0 ? 1 : cuts[r] || 1, dims.length ? cuts[c] || 1 : 1];
    // Neighbours are one cell above 4,096 slices.
    let step = 1;
    while (Math.ceil(rows / step) * Math.ceil(across / step) > 4096) step++;
    if (rows > 1 && height < Math.min(216, rows * 14)) height = Math.min(216, rows * 14);
    const edgesOf = (d, parts_) => { if (d < 0) return [0, 1]; const edges = sharding.edges[d]; return edges || Array.from({ length: parts_ + 1 }, (_, n) => dims[d] / parts_ * n); };
    const [down, over] = [edgesOf(r, rows), edgesOf(dims.length ? c : -1, across)];
    const strides = cuts.map((_, d) => product(cuts.slice(d + 1)));
    const numberAt = (y, x) => (r < 0 ? 0 : y * strides[r]) + (dims.length ? x * strides[c] : 0);
    const columnsOf = Math.ceil(across / step);
    const cellOf = (slice) => {
      const [y, x] = [r < 0 ? 0 : Math.floor(slice / strides[r]) % rows, dims.length ? Math.floor(slice / strides[c]) % across : 0];
      return Math.floor(y / step) * columnsOf + Math.floor(x / step);
    };
    const boxOf = (slice) => cuts.map((n, d) => { const at_ = Math.floor(slice / strides[d]) % n, edges = edgesOf(d, n); return [edges[at_], edges[at_ + 1]]; });
    const states = all.map((_, slice) => stateOf(sharding, slice)), lost = states.indexOf("lost");
    // A cell of several slices is as bad as its worst.
    const worst = new Map();
    states.forEach((each, slice) => { const cell = cellOf(slice); if (each === "lost" || each === "part" && worst.get(cell) !== "lost") worst.set(cell, each); });
    let chosen = Math.max(0, lost);
    const output = el("div", { class: "output", "aria-live": "polite" });
    const position = (edges, n, size) => (edges[edges.length - 1] ? edges[n] / edges[edges.length - 1] * size : 0);
    const select = (slice) => {
      chosen = slice;
      const box = boxOf(slice), lacking = all[slice].filter((file) => sharding.lacking.has(file));
      rects.forEach((rect, cell) => rect.classList.toggle("active", cell === cellOf(slice)));
      outline(fileNumbers(all[slice]));
      const volume = product(box.map(([start, stop]) => stop - start)), item = typeOf(p).full / product(dims);
      output.replaceChildren(paragraph("box", el("b", {}, whole ? "all" : `slice ${slice}`), ` ${shapeText(box.map(([start, stop]) => `${start}:${stop}`))} `,
        states[slice] === "lost" ? span("bad", `is on no ${unit} that is left`) : lacking.length ? span("warn", `not on ${places(fileNumbers(lacking))}`) : span("soft", `on ${places(fileNumbers(all[slice]))}`)),
      ...held(p, all[slice], sharding.lacking, volume * item).filter(Boolean), whole && all[0].length === 1 ? bar_(all[0][0]) : "", way ? "" : commandOf(p, box));
    };
    const bar_ = (file) => {
      const place = placeIn(file, p), size = files.bytes[fileAt.get(fileNumber(file))];
      if (!place || !size) return "";
      return svg("svg", { class: "place", viewBox: "0 0 100 14", preserveAspectRatio: "none", role: "img", "aria-label": `at byte ${plain(place[0])} of ${plain(size)}` }, svg("rect", { class: "ground", width: 100, height: 14 }), svg("rect", { class: "b4", x: 100 * place[0] / size, width: Math.max(0.5, 100 * place[1] / size), height: 14 }));
    };
    const rects = [], shapes = [], low = height / rows < 13;
    for (let y = 0; y < rows; y += step) for (let x = 0; x < across; x += step) {
      const from = numberAt(y, x);
      const [top_, end, left, right] = [position(down, y, height), position(down, Math.min(rows, y + step), height), position(over, x, width), position(over, Math.min(across, x + step), width)];
      const kind = worst.get(rects.length) || "held", gap = Math.min(end - top_, right - left) > 6 ? 1 : 0;
      const rect = svg("rect", { class: `slice ${kind} ${unit === "rank" && stageOf(all[from][0]) % 2 === 1 ? "t1" : "b1"}`, x: left + gap, y: top_ + gap, width: Math.max(0.5, right - left - 2 * gap), height: Math.max(0.5, end - top_ - 2 * gap), rx: gap ? 2 : 0, "data-slice": from });
      rects.push(rect);
      shapes.push(rect);
      if (!low && !whole) {
        const said = (kind === "lost" ? `${ranges(fileNumbers(all[from]), 2)} lost` : fileNumbers(all[from]).slice(0, 3).join(", ") + (all[from].length > 3 ? " …" : ""));
        const fits = said.length * 6.4 < right - left ? said : String(fileNumber(all[from][0])).length * 7 < right - left ? String(fileNumber(all[from][0])) : "";
        if (fits) shapes.push(svg("text", { class: kind, x: (left + right) / 2, y: (top_ + end) / 2 + 4 }, fits));
      }
    }
    const labels = [], skip = (edges, size, need) => Math.max(1, Math.ceil(need / (size / (edges.length - 1))));
    const outer = layoutSplit(p, r);
    if (low && outer > 1) for (let n = 0; n < outer; n++) labels.push(svg("text", { class: "left", x: width + 6, y: height / outer * n + 11 }, `from ${unit} ${fileNumber(all[numberAt(rows / outer * n, 0)][0])}`), svg("rect", { class: "edge", x: 0, y: height / outer * n, width, height: 1 }));
    if (dims.length > 1) down.forEach((edge, n) => { if ((n % skip(down, height, 13) === 0 && position(down, n, height) < height - 14) || n === down.length - 1) labels.push(svg("text", { class: "right", x: -6, y: position(down, n, height) + (n === down.length - 1 && n ? 2 : 8) }, String(edge))); });
    if (dims.length && (across > 1 || width > 60)) over.forEach((edge, n) => { if ((n % skip(over, width, 46) === 0 && position(over, n, width) < width - 40) || n === over.length - 1) labels.push(svg("text", { class: n && n === over.length - 1 ? "right" : n ? "" : "left", x: position(over, n, width), y: -5 }, String(edge))); });
    const blocks = whole && data.block && partner(p) && !SCALE.test(names[p]) && dims.length === 2 ? data.block : null;
    if (blocks) { for (let y = blocks[0]; y < tall; y += blocks[0]) shapes.push(svg("rect", { class: "edge", y: y / tall * height, width, height: 0.5 })); for (let x = blocks[1]; x < broad; x += blocks[1]) shapes.push(svg("rect", { class: "edge", x: x / broad * width, width: 0.5, height })); }
    const others = wide.filter((d) => d !== r && d !== c);
    const words_ = whole ? (all[0].length > 1 ? `Whole on ${plural(all[0].length, unit)}` : "Whole, not cut") : `${plain(all.length)} slices, each on ${sharding.copies === 1 ? `one ${unit}` : plural(sharding.copies, unit)}`;
    const named = dims.length > 1 ? `dimension ${c}: ${plain(broad)}${across > 1 ? `, cut ${across}` : ""}` : "";
    const step_ = (by) => { if (all[chosen + by]) select(chosen + by); };
    const pointed = (event) => { const hit = event.target.dataset.slice; if (hit !== undefined && Number(hit) !== chosen) select(Number(hit)); };
    const margin = Math.max(40, 7 * String(tall).length + 10);
    const picture = svg("svg", {
      class: "slices", id: way ? null : "slices", ...scalable(width + margin + (low && outer > 1 ? 98 : 12), height + 34), tabindex: 0, role: "application", "aria-label": `Slices of ${name_(p)}: ${words_}. Arrow keys move.`,
      onpointermove: pointed, onclick: pointed,
      onkeydown: keysOf({ ArrowRight: () => step_(dims.length ? strides[c] : 0), ArrowLeft: () => step_(-(dims.length ? strides[c] : 0)), ArrowDown: () => step_(r < 0 ? 1 : strides[r]), ArrowUp: () => step_(-(r < 0 ? 1 : strides[r])), Home: () => select(0), End: () => select(all.length - 1) }),
    }, svg("g", { transform: `translate(${margin} 28)` }, svg("text", { class: "left", y: -18 }, named), labels, shapes));
    queueMicrotask(() => select(chosen));
    return div(null, el("h4", {}, ways > 1 ? `Held in ${ways} ways, ${way + 1}: ` : "", words_), picture, blocks ? paragraph("soft", `${Math.ceil(tall / blocks[0])} × ${Math.ceil(broad / blocks[1])} blocks of ${blocks[0]} × ${blocks[1]}, a scale each`) : null,
      others.length ? paragraph("soft", `also cut: ${others.map((d) => `dimension ${d} in ${cuts[d]}`).join(", ")}; its first part is shown`) : null, output);
  }
  const layoutSplit = (p, d) => { const layout = layoutOf(p); return layout && layout.split && layout.shards > 1 && d === 0 ? layout.split[0] : 1; };
  const name_ = (p) => clean(shortened(names[p], 80));
  // How many elements there are of each power of two.
  const numbers = (row) => {
    const at_ = ["elements", "NaN", "Inf", "zeros", "min", "max", "mean", "norm"].map((title, n) => [title, row[n + 1] === null ? "" : n < 4 ? plain(row[n + 1]) : short(row[n + 1])]);
    const place = row[9] ? `[${row[9].index.join(", ")}]${row[9].file === null ? "" : `, ${unit} ${row[9].rank}, ${clean(row[9].file)}`}` : "";
    const levels = row[10] ? [...row[10][1]].map(Number) : [], wide = levels.length ? 350 / levels.length : 0;
    return div(null, el("h4", {}, "Numbers"), facts([...at_, ["first NaN or Inf", place ? span("bad", place) : null]]),
      levels.length ? svg("svg", { class: "levels", width: 350, height: 60, role: "img", "aria-label": `magnitudes from 2^${row[10][0]} to 2^${row[10][0] + levels.length - 1}` }, levels.map((level, n) => svg("rect", { class: "b4", x: n * wide, y: 44 - level * 5.5, width: Math.max(1, wide - 1), height: level * 5.5 })),
        svg("text", { class: "left", y: 57 }, `2^${row[10][0]}`), svg("text", { class: "right", x: 350, y: 57 }, `2^${row[10][0] + levels.length - 1}`)) : null);
  };
  const difference = (p) => {
    const row = differing.get(p);
    const command = copyable(["reshard", "diff", ...compared.sides.map((side) => quote(side.path)), "--include", quote(names[p].replace(/[[?*]/g, "[$&]")), ...data.options.map(quote)]);
    const said = paragraph(`r${result[p]} text`, `${RESULTS[result[p]]}${row && row[2] !== null ? `: ${plain(row[2])} of ${plural(row[1], "element")}` : ""}`);
    if (!row || !row[5]) return div(null, said, command);
    return div(null, said, el("h4", {}, "First of the largest differences"), el("table", { class: "first" }, el("tbody", {}, el("tr", {}, el("th", { scope: "row" }, "at"), el("td", {}, shapeText(row[5])), el("td", {})),
      [0, 1].map((n) => el("tr", {}, el("th", { scope: "row", class: "AB"[n] }, "AB"[n]), el("td", { class: "n" }, short(row[6 + 2 * n])), el("td", { class: "soft" }, pathText(row[7 + 2 * n])))))), command);
  };

  // A conversion: bytes from every source to every target.
  const conversion = (moves) => {
    const { together } = moves, relations = ["parameters", "copied"].map((key) => ({ first: moves[key].first, pattern: repeated(moves[key].pattern) }));
    const pairs = [];
    relations.forEach((relation, copied) => relation.pattern.forEach((found, target) => {
      if (found < 0) return;
      const pattern = moves.patterns[found];
      let source = relation.first[target];
      pairs.push([source, target, ...moves.values[pattern[0]], copied]);
      for (let n = 1; n < pattern.length; n += 2) pairs.push([source += pattern[n], target, ...moves.values[pattern[n + 1]], copied]);
    }));
    const nouns = [moves.source_noun, moves.target_noun], ends = [moves.sources, moves.targets], clusters = [moves.source_cluster, moves.target_cluster];
    const stagesOf = clusters.map((each) => (each ? each.stages : []));
    const stageAt = stagesOf.map((found, n) => { const at_ = new Int32Array(ends[n]).fill(-1); found.forEach(([first, devices], stage) => at_.fill(stage, first, first + devices)); return at_; });
    const readBytes = new Float64Array(ends[0]), sourcesOf = Array.from({ length: Math.ceil(ends[1] / together) }, () => new Set());
    for (const [source, target, taken] of pairs) { readBytes[source * together] += taken; sourcesOf[target].add(source); }
    const busiest = readBytes.indexOf(largest(readBytes)), mean = moves.taken / ends[0], fans = sourcesOf.map((each) => each.size).filter(Boolean);
    const fileSizes = repeated(moves.bytes);
    const [low, most] = [Math.min(...fans), Math.max(...fans)];
    const busy = readBytes[busiest] / mean;
    const facts_ = div("facts four", fact("Moved", ...binary(moves.taken), `a target ${nouns[1]} writes ${bytes(largest(fileSizes))} at most`), fact("Requests", plain(moves.requests), "", `${bytes(moves.requests ? moves.taken / moves.requests : 0)} each on average`),
      together === 1 && fans.length ? fact("Sources of a target", low === most ? plain(low) : `${low}–${most}`, "", `of ${plural(ends[0], nouns[0])}`) : null, together === 1 && mean ? fact("Busiest source", el("span", { class: busy >= 2 ? "warn" : null }, `${busy.toFixed(2)} ×`), "", `the mean: ${nouns[0]} ${busiest}, ${bytes(readBytes[busiest])}`) : null);
    // Levels: one cell is so many ranks, or a stage.
    const cellsOf = (level) => ends.map((total, n) => {
      if (level === "stage") return stagesOf[n].map(([first, devices]) => [first, first + devices]);
      return Array.from({ length: Math.ceil(total / level) }, (_, at_) => [at_ * level, Math.min(total, (at_ + 1) * level)]);
    });
    const fitting = [1, 8, 64, 512, 4096].filter((level) => level >= together && Math.max(...ends) / level <= 128);
    const staged = stagesOf.every((found) => found.length > 1) && together === 1;
    const finest = fitting[0] || 4096;
    const levels = [...(staged ? ["stage"] : []), finest * 8 <= Math.max(...ends) / 2 && finest * 8 <= 4096 ? finest * 8 : null, finest].filter(Boolean);
    let level = finest, cells_ = [], cursor = [0, 0], cellSize = 4, target = 0, amounts = null;
    const extent = (n, [first, end]) => (end - first === 1 ? `${first}` : `${first}–${end - 1}`), some = (n, cell) => `${nouns[n]}${cell[1] - cell[0] > 1 ? "s" : ""} `;
    const said = el("p", { id: "cell", "aria-live": "polite" }), detail = el("div", { id: "detail" }), legend = div("legend");
    const collect = (rows, columns) => {
      // Which row and column a rank is in.
      const at_ = [rows, columns].map((found, n) => { const index = new Int32Array(ends[n]).fill(-1); found.forEach(([first, end], cell) => index.fill(cell, first, end)); return index; });
      const size = new Float64Array(rows.length * columns.length), copied = new Float64Array(rows.length * columns.length), asked = new Float64Array(rows.length * columns.length);
      for (const [source, to, taken, requests, copy] of pairs) {
        const [y, x] = [at_[0][source * together], at_[1][to * together]];
        if (y < 0 || x < 0) continue;
        (copy ? copied : size)[y * columns.length + x] += taken;
        asked[y * columns.length + x] += requests;
      }
      return { size, copied, asked };
    };
    const canvas = el("canvas", {
      id: "matrix", tabindex: 0, role: "application", "aria-label": `Bytes from ${plural(ends[0], `source ${nouns[0]}`)}, down, to ${plural(ends[1], `target ${nouns[1]}`)}, across. Arrow keys move, Enter goes down, Backspace up.`,
      onpointermove: (event) => { const found = under(event); if (found) tell(found); }, onclick: (event) => { const found = under(event); if (found) move(found); },
      onkeydown: keysOf({ ArrowRight: () => move([cursor[0], cursor[1] + 1]), ArrowLeft: () => move([cursor[0], cursor[1] - 1]), ArrowDown: () => move([cursor[0] + 1, cursor[1]]), ArrowUp: () => move([cursor[0] - 1, cursor[1]]), Enter: () => enter(), Backspace: () => leave() }),
    });
    let box = [0, 0];
    const under = (event) => {
      const place = canvas.getBoundingClientRect(), y = Math.floor((event.clientY - place.top - box[1]) / cellSize[1]), x = Math.floor((event.clientX - place.left - box[0]) / cellSize[0]);
      return y >= 0 && x >= 0 && y < cells_[0].length && x < cells_[1].length ? [y, x] : null;
    };
    const fineCells = (n, [first, end]) => { const step = Math.max(together, (end - first) / 8); return Array.from({ length: Math.ceil((end - first) / step) }, (_, at_) => [Math.round(first + at_ * step), Math.min(end, Math.round(first + (at_ + 1) * step))]); };
    let path = [];
    const shadeOf = (value, high) => Math.min(5, Math.max(1, Math.ceil(5 * value / high)));
    const draw = () => {
      const scale = devicePixelRatio || 1, room = Math.max(240, Math.min(canvas.parentElement ? canvas.parentElement.clientWidth : 700, 720));
      const [rows, columns] = cells_.map((each) => each.length);
      box = [74, 44];
      const side = 56, w = Math.max(1.5, Math.min((room - box[0] - side) / columns, columns <= 8 ? 84 : 48)), h = Math.max(1.5, Math.min(w >= 30 ? 34 : Math.max(w, 3), 560 / rows));
      cellSize = [w, h];
      const width = box[0] + w * columns + side, height = box[1] + h * rows + 40;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      const context = canvas.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.font = "11px system-ui,sans-serif";
      context.textBaseline = "middle";
      const style = getComputedStyle(document.documentElement), palette = new Map();
      const colour = (name) => { if (!palette.has(name)) palette.set(name, style.getPropertyValue(`--${name}`).trim()); return palette.get(name); };
      const { size, copied } = amounts, high = largest(size), ink = colour("ink"), soft = colour("soft"), line = colour("line");
      const rect = (shade, x, y, ...rest) => { context.fillStyle = shade; context.fillRect(x, y, ...rest); };
      rect(colour("panel"), box[0], box[1], w * columns, h * rows);
      const gap = w > 5 ? 1 : 0, used = new Set();
      let copies = false;
      for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
        const n = y * columns + x;
        if (!size[n] && !copied[n]) continue;
        const shade = size[n] ? shadeOf(size[n], high) : 0;
        if (shade) used.add(shade); else copies = true;
        rect(colour(shade ? `b${shade}` : "amber3"), box[0] + x * w, box[1] + y * h + (shade ? 0 : h * 0.35), w - gap, shade ? h - gap : Math.max(1.5, h * 0.3));
        if (shade && w >= 30 && h >= 14) {
          context.fillStyle = shade > 3 ? colour("on") : ink;
          context.textAlign = "center";
          const [value, unit_] = binary(size[n]);
          context.fillText(w >= 64 ? `${value} ${unit_}` : value.replace(/\.0$/, ""), box[0] + (x + 0.5) * w, box[1] + (y + 0.5) * h, w - 4);
        }
      }
      // Axes: stages, or numbers.
      const byStage = stagesOf.map((found) => found.length > 1);
      context.fillStyle = ink;
      context.textAlign = "left";
      context.fillText(`target ${byStage[1] ? "stage" : nouns[1]}, ${plural(ends[1], nouns[1])}`, box[0], 10);
      context.save();
      context.translate(10, box[1] + Math.min(h * rows, 200));
      context.rotate(-Math.PI / 2);
      context.fillText(`source ${byStage[0] ? "stage" : nouns[0]}, ${plural(ends[0], nouns[0])}`, 0, 0);
      context.restore();
      [0, 1].forEach((n) => {
        const size_ = cellSize[1 - n], groups = [];
        cells_[n].forEach(([first], at_) => { const label = byStage[n] ? stageAt[n][first] : first; if (!groups.length || (byStage[n] && groups[groups.length - 1][0] !== label) || !byStage[n]) groups.push([label, at_, at_ + 1]); else groups[groups.length - 1][2] = at_ + 1; });
        const wide = n ? largest(groups.map(([label]) => context.measureText(label).width)) + 10 : 12, every = Math.max(1, Math.ceil(wide * groups.length / (size_ * cells_[n].length)));
        const chosen = groups.findIndex(([, from, to]) => cursor[n] >= from && cursor[n] < to);
        groups.forEach(([label, from, to], at_) => {
          if (byStage[n] && groups.length > 1 && from) rect(line, n ? box[0] + from * w - 0.5 : box[0], n ? box[1] : box[1] + from * h - 0.5, n ? 1 : w * columns, n ? h * rows : 1);
          const on = at_ === chosen;
          if (!on && (at_ % every || Math.abs(at_ - chosen) < every)) return;
          context.fillStyle = on ? ink : soft;
          context.font = `${on ? "bold " : ""}11px system-ui,sans-serif`;
          context.textAlign = n ? "center" : "right";
          if (n) context.fillText(label, box[0] + (from + to) / 2 * w, box[1] - 10); else context.fillText(label, box[0] - 8, box[1] + (from + to) / 2 * h);
        });
      });
      context.font = "11px system-ui,sans-serif";
      // Margins: read at the right, written below.
      const [rowSums, columnSums] = [new Float64Array(rows), new Float64Array(columns)];
      size.forEach((value, n) => { const all = value + copied[n]; rowSums[Math.floor(n / columns)] += all; columnSums[n % columns] += all; });
      const [mostRead, mostWritten] = [Math.max(...rowSums), Math.max(...columnSums)];
      context.fillStyle = soft;
      context.textAlign = "left";
      context.fillText("read", box[0] + w * columns + 6, box[1] - 10);
      context.textAlign = "right";
      context.fillText("written", box[0] - 8, box[1] + h * rows + 14);
      rowSums.forEach((value, y) => rect(colour("b2"), box[0] + w * columns + 6, box[1] + y * h, (side - 10) * value / (mostRead || 1), h - gap));
      columnSums.forEach((value, x) => { const tall = 24 * value / (mostWritten || 1); rect(colour("b2"), box[0] + x * w, box[1] + h * rows + 6, w - gap, tall); });
      const [y, x] = cursor;
      if (w < 30) { context.strokeStyle = ink; context.setLineDash([2, 2]); context.beginPath(); context.moveTo(box[0], box[1] + (y + 0.5) * h); context.lineTo(box[0] + x * w, box[1] + (y + 0.5) * h); context.moveTo(box[0] + (x + 0.5) * w, box[1]); context.lineTo(box[0] + (x + 0.5) * w, box[1] + y * h); context.stroke(); context.setLineDash([]); }
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.strokeRect(box[0] + x * w, box[1] + y * h, Math.max(3, w - gap), Math.max(3, h - gap));
      context.lineWidth = 1;
      const words_ = level === "stage" ? "one stage" : level > 1 ? `${level} ${nouns[0]}s` : `one ${nouns[0]}`;
      legend.replaceChildren(...[...used].sort().map((shade) => el("span", {}, el("i", { class: `key b${shade}` }), `${shade === 1 || shade === [...used].sort()[0] ? "up to " : ""}${bytes(high * shade / 5)}`)), copies ? el("span", {}, el("i", { class: "key amber3" }), "values copied as they are") : "",
        span("soft", `at most ${bytes(mostWritten)} written and ${bytes(mostRead)} read by ${words_}`));
    };
    const tell = ([y, x]) => {
      const n = y * cells_[1].length + x, all = amounts.size[n] + amounts.copied[n];
      said.textContent = `source ${some(0, cells_[0][y])}${extent(0, cells_[0][y])} to target ${some(1, cells_[1][x])}${extent(1, cells_[1][x])}: ${plain(all)} bytes in ${plural(amounts.asked[n], "request")}${amounts.copied[n] ? `, ${plain(amounts.copied[n])} of them values copied as they are` : ""}`;
    };
    const move = ([y, x]) => {
      cursor = [Math.max(0, Math.min(cells_[0].length - 1, y)), Math.max(0, Math.min(cells_[1].length - 1, x))];
      path = [[cells_[0][cursor[0]], cells_[1][cursor[1]]]];
      draw();
      tell(cursor);
      show(cells_[1][cursor[1]][0]);
    };
    const enter = () => {
      const [rows, columns] = path[path.length - 1];
      if (rows[1] - rows[0] <= together && columns[1] - columns[0] <= together) return;
      const fine = [fineCells(0, rows), fineCells(1, columns)], found = collect(...fine), best = found.size.indexOf(largest(found.size));
      path.push([fine[0][Math.floor(best / fine[1].length)], fine[1][best % fine[1].length]]);
      show(path[path.length - 1][1][0]);
    };
    const leave = () => { if (path.length > 1) { path.pop(); show(path[path.length - 1][1][0]); } };
    const fine = () => {
      const [rows, columns] = path[path.length - 1];
      if (rows[1] - rows[0] <= together && columns[1] - columns[0] <= together) return "";
      const cells = [fineCells(0, rows), fineCells(1, columns)], { size, copied } = collect(...cells), high = largest(size) || 1;
      const unit_ = binary(high)[1], divide = 1024 ** byteUnits.indexOf(unit_), shapes = [];
      cells[0].forEach((row, y) => {
        shapes.push(svg("text", { class: "right", x: -6, y: y * 26 + 16 }, String(row[0])));
        cells[1].forEach((column, x) => {
          if (!y) shapes.push(svg("text", { x: x * 44 + 20, y: -6 }, String(column[0])));
          const n = y * cells[1].length + x, shade = size[n] ? shadeOf(size[n], high) : 0, value = size[n] / divide;
          shapes.push(svg("rect", { class: shade ? `b${shade}` : copied[n] ? "amber3" : "ground", x: x * 44, y: y * 26, width: 42, height: 24, rx: 2, onclick: () => { path.push([row, column]); show(column[0]); } }),
            shade ? svg("text", { class: shade > 3 ? "on" : "", x: x * 44 + 21, y: y * 26 + 16 }, value >= 100 ? value.toFixed(0) : value.toFixed(1)) : "");
        });
      });
      const words_ = [columns, rows].map(([first, end], n) => { const each = cells[1 - n][0][1] - cells[1 - n][0][0]; return each > 1 ? `a ${n ? "row" : "column"} is ${each} ${n ? "source" : "target"} ${nouns[1 - n]}s` : `${n ? "source" : "target"} ${nouns[1 - n]}s ${n ? "down" : "across"}`; });
      return [paragraph("soft", `${unit_}; ${words_.join(", ")}`), svg("svg", { class: "fine", ...scalable(46 + 44 * cells[1].length, 22 + 26 * cells[0].length), role: "img", "aria-label": "the selected cell, one level finer" }, svg("g", { transform: "translate(44 18)" }, shapes))];
    };
    const input = el("input", { type: "number", id: "targetnumber", min: 0, max: ends[1] - 1, value: 0, oninput: () => { const value = Number(input.value); if (input.value !== "" && Number.isInteger(value) && value >= 0 && value < ends[1]) show(value, true); } });
    const show = (number_, only) => {
      target = number_;
      if (document.activeElement !== input) input.value = target;
      const found = new Map();
      for (const [source, to, taken, requests] of pairs) if (to === Math.floor(target / together)) { const before = found.get(source) || [0, 0]; found.set(source, [before[0] + taken, before[1] + requests]); }
      const order = [...found].sort((a, b) => b[1][0] - a[1][0] || a[0] - b[0]), all = sum(order.map(([, [taken]]) => taken)), group = (at_) => (together > 1 ? `${at_ * together}–${Math.min(ends[0], (at_ + 1) * together) - 1}` : String(at_));
      const [rows, columns] = path[path.length - 1], cell = collect([rows], [columns]), total = cell.size[0] + cell.copied[0];
      const stage = (n, [first]) => (stagesOf[n].length > 1 ? `, stage ${stageAt[n][first]}` : "");
      const columns_ = [[`source ${nouns[0]}`, true], ...(stagesOf[0].length > 1 ? [["stage", true]] : []), ["bytes", true], ["share", true], ["requests", true]];
      const command = moves.command ? copyable(moves.command.map((word) => (word === "{rank}" ? String(target) : quote(word)))) : "";
      detail.replaceChildren(
        ...(only ? [] : [el("h4", {}, "Selected cell: ", plural(rows[1] - rows[0], `source ${nouns[0]}`), " × ", plural(columns[1] - columns[0], `target ${nouns[1]}`)),
          path.length > 1 ? paragraph("crumbs", path.map(([a, b], n) => [n ? " › " : "", button({ class: "link", onclick: () => { path.length = n + 1; show(b[0]); } }, n ? `${extent(0, a)} × ${extent(1, b)}` : "cell")])) : "",
          el("p", {}, el("b", {}, bytes(total)), ` from source ${some(0, rows)}`, el("b", {}, extent(0, rows)), stage(0, rows), ` to target ${some(1, columns)}`, el("b", {}, extent(1, columns)), stage(1, columns)), fine()].flat()),
        el("h4", { id: "target" }, `Target ${nouns[1]} ${together > 1 ? group(Math.floor(target / together)) : target} reads ${bytes(all)} from ${plural(order.length, nouns[0])}`),
        table(columns_, order.slice(0, 5).map(([source, [taken, requests]]) => [group(source), ...(stagesOf[0].length > 1 ? [String(stageAt[0][source * together])] : []), el("span", { title: plain(taken) }, bytes(taken)), share(taken, all), plain(requests)])),
        order.length > 5 ? paragraph("soft", `and ${plain(order.length - 5)} more`) : "", command);
    };
    const setLevel = (next) => { level = next; cells_ = cellsOf(level); amounts = collect(...cells_); buttons.forEach((each, n) => each.setAttribute("aria-pressed", levels[n] === level)); const best = amounts.size.indexOf(largest(amounts.size)); move([Math.floor(best / cells_[1].length), best % cells_[1].length]); };
    const buttons = levels.map((each) => button({ "aria-pressed": false, onclick: () => setLevel(each) }, each === "stage" ? "Stages" : each === 1 ? `${nouns[0][0].toUpperCase()}${nouns[0].slice(1)}s` : `${each} ${nouns[0]}s`));
    redraws.push(() => amounts && draw());
    starters.push(() => setLevel(finest));
    const line = clusters.map((each, n) => [axesText(each), plural(ends[n], nouns[n])].filter(Boolean).join(", ")).join(" → ") + (together > 1 ? `; ${together} neighbours are one, because there are too many numbers` : "");
    return el("section", { id: "conversion" }, div("tools", el("h2", {}, "Conversion"), levels.length > 1 ? span("modes", buttons) : null, span("soft", line), span("gap"), el("label", { for: "targetnumber", class: "soft" }, `target ${nouns[1]}`), input), facts_,
      div("two", div(null, canvas, legend, said), detail));
  };
  const starters = [];

  // Ranks and files.
  const fileList = (found, noun, label) => {
    const order = found.number.map((_, n) => n).sort((a, b) => (found.state[b] !== "ok") - (found.state[a] !== "ok") || a - b), most = largest(found.bytes) || 1;
    const rows = el("div", { class: "rows", role: "rowgroup" }), host = el("div", { class: "grid files", tabindex: 0, role: "grid", "aria-label": label, "aria-rowcount": order.length, onscroll: () => draw() }, rows);
    rows.style.height = `${order.length * ROW}px`;
    const draw = () => {
      const [from, to] = seen(host, order.length);
      rows.replaceChildren(...order.slice(from, to).map((n, index) => {
        const same = found.same && found.same[n] !== null && found.same[n] !== found.number[n] ? `as ${noun} ${found.same[n]}` : "", state_ = found.state[n];
        const cells_ = [[found.number[n] ?? "", "n"], [found.path[n] === null ? "none" : pathText(found.path[n]), "first"], [state_ === "missing" ? "" : bytes(found.bytes[n]), "n"],
          [barOf(found.bytes[n] / most), "w"], [el("span", { class: state_ === "ok" ? "soft" : "bad" }, state_), ""], [same, "w soft"]];
        const row = el("div", { class: "row", role: "row", "aria-rowindex": from + index + 1 }, cells_.map(([cell, name]) => el("div", { class: `cell ${name}`, role: "gridcell" }, cell)));
        row.style.top = `${(from + index) * ROW}px`;
        return row;
      }));
    };
    starters.push(draw);
    redraws.push(draw);
    return host;
  };
  const filesTitle = unit === "rank" ? "Ranks and files" : "Files";
  const steps = () => (data.steps.length > 1 ? table([["step", false], ["size", true], ["state", false], ["", false]], data.steps.slice(0, 200).map((step) => [step.step === null ? "no step in the names" : clean(step.step), step.nbytes === null ? "" : bytes(step.nbytes), step.state, step.shown ? "shown here" : ""])) : null);
  const fileSection = el("section", { id: "files" }, el("h2", {}, filesTitle), steps(),
    compared ? compared.sides.map((side, n) => [el("h4", {}, `${"AB"[n]}: ${clean(side.path)}`), fileList(filesOf(side.files), "file", `Files of ${"AB"[n]}`)])
      : [paragraph("soft text", `below ${clean(data.files.base)}`), fileList(files, unit, filesTitle)]);

  // Everything together.
  apply();
  open();
  const tensors = el("section", { id: "tensors" }, div("tools", el("h2", {}, compared ? "Differences" : "Tensors"), span("searching", search, el("kbd", { "aria-hidden": "true" }, "/")), span("modes", modes), chips, span("gap"), status),
    div("pane", div(null, list, nothing), inspector));
  const madeOf = compared ? null : made(), cutting = compared ? null : cut();
  const overview = el("section", { id: "overview" }, compared ? differences() : factsOf(), madeOf || cutting ? div("halves", madeOf, cutting) : null);
  const strips = layerSection(), moved = data.moves ? conversion(data.moves) : null;
  const sections = [["overview", "Overview", overview], ["conversion", "Conversion", moved], ["tensors", compared ? "Differences" : "Tensors", tensors], ["files", filesTitle, fileSection]].filter((each) => each[2]);
  const links = sections.map(([id, title]) => el("a", { href: `#${id}`, onclick: (event) => { event.preventDefault(); document.getElementById(id).scrollIntoView(); } }, title));
  const unread = [compared && !compared.values ? "types and shapes were compared, values were not" : data.statistics || compared ? "" : "contents were not compared"].filter(Boolean);
  document.body.append(header, el("nav", { "aria-label": "Sections" }, div(null, links)), fill(el("main"), {}, [compared ? null : problems(), overview, strips, moved, tensors, fileSection]),
    el("footer", {}, paragraph("mono", clean(data.command)), el("p", {}, [`reshard ${data.version}`, data.statistics || (compared && compared.values) ? "from the contents of all tensors" : "from names, sizes, headers and strategies", ...unread, "1 KiB is 1,024 bytes"].join("; "))));
  const current = () => {
    // The last section may be too short to reach the top.
    const end = scrollY > 0 && scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
    let on = end ? sections.length - 1 : 0;
    if (!end) sections.forEach(([, , section], n) => { if (section.getBoundingClientRect().top <= 60) on = n; });
    links.forEach((link, n) => link.setAttribute("aria-current", n === on));
  };
  addEventListener("scroll", current, { passive: true });
  current();
  refresh();
  listeners.forEach((listener) => listener());
  starters.forEach((start) => start());
  const lostFirst = names.findIndex((_, p) => layoutOf(p)?.lost);
  const heaviest = () => { let best = null, most = -1; for (const found of skeletons.values()) { const size = compared ? severity(found[0]) : sum(found.map((p) => sizes[p])); if (size > most) { most = size; best = found[0]; } } return best; };
  const hashed = () => { try { return indexOf.get(decodeURIComponent(location.hash.slice(1))); } catch { return undefined; } };
  const start = hashed() ?? (lostFirst >= 0 ? lostFirst : heaviest());
  if (start !== null && start !== undefined) choose(start, hashed() === undefined);
  addEventListener("hashchange", () => { const p = hashed(); if (p !== undefined) choose(p, true); });
  const again = () => { redraws.forEach((redraw) => redraw()); drawRows(); };
  for (const [name, on] of [["beforeprint", true], ["afterprint", false]]) addEventListener(name, () => { printing = on; again(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  // Pictures depend on the width alone; the list's height changes with its rows.
  let wide = list.clientWidth;
  new ResizeObserver(() => {
    if (list.clientWidth === wide) { later(); return; }
    wide = list.clientWidth;
    requestAnimationFrame(again);
  }).observe(list);
  requestAnimationFrame(() => { document.body.dataset.drawn = Math.round(performance.now() - started); });
})();
