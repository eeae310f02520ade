// What each page looks like. Its data is what the module of the same name in remora/dashboard/pages makes.

import { html, useContext } from "/static/htm-preact.js";
import { address, bytes, count, percent, plural, rate, seconds, time } from "/static/format.js";
import { Chart, Histogram, joined, Spread } from "/static/charts.js";
import { Graph } from "/static/graph.js";
import { Matrix, METRICS } from "/static/matrix.js";
import { barColor, Timeline } from "/static/timeline.js";
import { Card, Choice, Empty, Facts, Place, Stack, State, Table, Tile, tone } from "/static/ui.js";

const THROUGHPUT = [["served", "served", "blue"], ["failed", "failed", "bad"]];
const LATENCY = [["p99", "99 %", "amber"], ["p50", "median", "blue"]];
const CURVES = ["blue", "amber", "violet", "good", "bad", "pink", "faint", "text"];

function Overview({ view }) {
  const { totals: all, curves } = view;
  return html`<div class="tiles">
      <${Tile} label="Workers" value=${`${all.alive}/${all.all}`} note="alive" bad=${all.alive < all.all} />
      <${Tile} label="Calls a second" value=${rate(all.served)} note=${all.failed ? `${rate(all.failed)} fail` : "none fail"} href="/functions" />
      <${Tile} label="Latency" value=${seconds(all.p50)} note=${`99 %: ${seconds(all.p99)}`} href="/functions" />
      <${Tile} label="In flight" value=${count(all.in_flight)} note=${all.oldest == null ? "" : `oldest ${seconds(all.oldest)}`} href="/calls" bad=${all.oldest > 10} />
      <${Tile} label="Pool" value=${`${count(all.running)}/${count(all.limit)}`} note=${`${count(all.queued)} queued`} />
      <${Tile} label="Memory" value=${bytes(all.resident)} note=${`${bytes(all.shared)} shared`} />
    </div>
    <div class="columns">
      <${Card} title="Calls a second"><${Chart} data=${curves} lines=${THROUGHPUT} kind="rate" label="Calls a second over time" /><//>
      <${Card} title="Latency of calls"><${Chart} data=${curves} lines=${LATENCY} kind="seconds" label="Latency of calls over time" /><//>
    </div>
    ${view.cells && html`<${Card} title="All workers" note="by rank; the fuller, the busier"><div class="cells">${view.cells.map(([name, state, load]) => html`<a key=${name} class=${tone(state)} href=${address("workers", name)} title=${`${name}: ${state}, ${percent(load)} of its pool`} aria-label=${`${name}, ${state}`}><i style=${{ height: `${Math.max(load * 100, 8)}%` }}></i></a>`)}</div>
      <div class="columns"><div><h3>Calls served a second</h3><${Spread} ...${view.bars.served} unit="/s" label="How many workers serve how many calls a second" /></div><div><h3>Queued calls</h3><${Spread} ...${view.bars.queued} unit="calls" label="How many workers have how many calls queued" /></div></div><//>`}
    <${Card} title="Workers" note="trouble first"><${Table} table=${view.workers} live /><//>
    <${Card} title="What happened last" actions=${html`<a href="/events">All events</a>`}><${Table} table=${view.events} empty=${html`<${Empty} title="Nothing has happened">Joins, suspicions, deaths and reconnects will be here.<//>`} /><//>`;
}

function Calls({ view }) {
  if (view.key) return html`<${Call} view=${view} />`;
  const stages = Object.entries(view.stages);
  return html`<h1>Calls under way</h1>
    <div class="tiles">${stages.map(([stage, number]) => html`<${Tile} label=${stage} value=${count(number)} note=${STAGES[stage]} />`)}</div>
    <${Card}><${Table} table=${view.calls} live empty=${html`<${Empty} title="No call is under way">Calls that take longer than a look at the group (half a second) will be here. <a href="/functions">Functions</a> counts all of them.<//>`} /><//>`;
}

const STAGES = {
  unsent: "wait at the caller", sent: "on their way", begun: "run at the callee", queued: "wait for a thread", running: "run now", answering: "answer waits to be sent",
};

function Call({ view }) {
  const { call, chain } = view;
  return html`<h1>Call <span class="mono">${view.key}</span></h1>
    ${call
      ? html`<${Card}><${Facts} pairs=${[
          ["Function", html`<a class="mono" href=${address("functions", call.function)}>${call.function}</a>`],
          ["From", html`<a href=${address("workers", call.from)}>${call.from}</a>`], ["To", html`<a href=${address("workers", call.to)}>${call.to}</a>`],
          ["Stage", html`<${State} value=${call.stage} />`], ["Age", seconds(call.age)], ["Deadline in", call.left == null ? "none" : seconds(call.left)],
          ["Size", bytes(call.bytes)], ["Made by", call.parent && html`<a class="mono" href=${address("calls", call.parent)}>${call.parent}</a>`],
          ["Waits", call.asynchronous ? "no thread: it is asynchronous" : ""]]} /><//>
        <${Chain} chain=${chain} />
        ${view.children.rows.length > 0 && html`<${Card} title="Calls that it makes"><${Table} table=${view.children} /><//>`}`
      : html`<${Empty} title="This call is not under way">It has ended, or the workers that know it did not answer.<//>`}
    ${view.events.length > 0 && html`<${Card} title="What was seen of it"><ul class="lines">${view.events.map((each) => html`<li><span class="note">${time(each.time)}</span> ${each.worker}: ${each.kind}${each.seconds != null ? ` after ${seconds(each.seconds)}` : ""} ${each.text}</li>`)}</ul><//>`}`;
}

// From a call to what holds it up, one step below the other; the last one has the stack that matters.
function Chain({ chain }) {
  if (!chain || !chain.steps.length) return "";
  const last = chain.steps.length - 1;
  return html`<${Card} title=${chain.cyclic ? "A cycle: it waits for itself" : "What it waits for"} note=${chain.cyclic && chain.expires != null ? `the first deadline ends it in ${seconds(chain.expires)}` : ""} id="chain">
    <p class=${chain.cyclic ? "sentence bad" : "sentence"}>${chain.text}.</p>
    <ol class="chain">${chain.steps.map((step, at) => html`<li class="${chain.cyclic ? "bad" : ""} ${step.gone ? "gone" : ""} ${at === last ? "last" : ""}">
      <div class="what">${step.href ? html`<a href=${step.href}>${step.text}</a>` : step.text} ${step.thread && step.thread !== step.text && html`<span class="note">in <a href=${step.thread_href}>${step.thread}</a></span>`}
        ${step.remark && at === last && !(chain.cyclic) ? html`<span class="note"> ${step.remark}</span>` : ""}</div>
      ${chain.cyclic && at === last ? html`<div class="note">↻ back to the beginning</div>` : step.stack.length > 0 && html`<details open=${at >= last - 1}><summary>Stack</summary><${Stack} lines=${step.stack} /></details>`}
      ${step.waits && html`<div class="waits">${step.waits}</div>`}</li>`)}</ol><//>`;
}

function Waiting({ view }) {
  return html`<h1>What waits for what</h1>
    ${view.cycles.map((cycle) => html`<p class="sentence bad" key=${cycle.text}>${cycle.href ? html`<a href=${cycle.href}>${cycle.text}</a>` : cycle.text}.</p>`)}
    <${Card}>${view.boxes.length
      ? html`<${Graph} view=${view} />${view.left_out > 0 && html`<p class="note">${plural(view.left_out, "more box", "")} not drawn: cycles and the longest waits come first.</p>`}`
      : html`<${Empty} title="Nothing waits">When a thread waits for a call, a lock, a reference, a barrier or room, it is drawn here with what it waits for.<//>`}<//>
    ${view.edges.length > 0 && html`<${Card} title="The same in words"><ul class="lines">${sentences(view).map(([edge, text, to]) => html`<li class=${edge.bad ? "bad" : ""}>${text} ${text.includes(to) ? "" : html`<span class="note">→ ${to}</span>`}</li>`)}</ul><//>`}`;
}

// Each edge in words, and what it leads to. A barrier says once who has not come, and a call to a worker that is gone says where it is.
function sentences(view) {
  const boxes = new Map(view.boxes.map((box) => [box.id, box])), found = new Map();
  for (const edge of view.edges) {
    const from = boxes.get(edge.from), said = edge.text || from.note || "waits";
    const text = `${from.text}${from.kind === "gathering" ? ":" : ""} ${said}`;
    if (!edge.text || !found.has(text)) found.set(edge.text ? text : `${text}\n${edge.to}`, [edge, text, boxes.get(edge.to).text]);
  }
  return [...found.values()];
}

function TimelinePage({ view }) {
  const place = useContext(Place);
  const spans = [["1", "1 s"], ["5", "5 s"], ["20", "20 s"], ["60", "1 min"], ["300", "5 min"]];
  return html`<h1>Timeline</h1>
    <div class="tools"><${Choice} label="How long" value=${String(Math.round(view.seconds * 1000) / 1000)} options=${spans} onChange=${(value) => place.setQuery({ seconds: value })} />
      <select aria-label="Worker" value=${place.query.worker || ""} onChange=${(event) => place.setQuery({ worker: event.currentTarget.value })}><option value="">${view.chosen ? `the first ${view.chosen} workers` : "all workers"}</option>${view.workers.map((name) => html`<option value=${name}>${name}</option>`)}</select>
      ${!view.now && html`<button onClick=${() => place.setQuery({ end: "" })}>Go on with now</button>`}
      <span class="note">wheel or + − zooms, drag or ← → moves, 0 is now</span></div>
    <${Card}>${view.rows.length ? html`<${Timeline} view=${view} />` : html`<${Empty} title="Nothing ran in this time">A bar appears when a function has run on a worker.<//>`}
      ${view.left_out > 0 && html`<p class="note">${plural(view.left_out, "less busy thread")} not drawn.</p>`}
      <div class="legend">${view.functions.slice(0, 12).map((name) => html`<a href=${address("functions", name)}><i style=${{ background: barColor(name) }}></i>${name}</a>`)}<span><i class="thin"></i>waits for a call</span><span><i class="black"></i>failed</span><span><i class="white"></i>idle</span></div><//>`;
}

function References({ view }) {
  if (view.id) return html`<${Reference} view=${view} />`;
  const lines = view.growth.map((each, at) => [`s${at}`, each.worker, CURVES[at]]);
  return html`<h1>Remote references</h1>
    <div class="tiles"><${Tile} label="Values" value=${count(view.count)} note="kept for references" /><${Tile} label="Size" value=${bytes(view.bytes)} note="of their tensors" /><${Tile} label="Held" value=${count(view.held)} note="references to other workers" /></div>
    <${Card} title="Growth" note="values by owner">${lines.length ? html`<${Chart} data=${joined(view.growth, "count")} lines=${lines} kind="count" label="Values by owner over time" />` : html`<${Empty} title="No references yet">The curve begins with the first one.<//>`}<//>
    <${Card} title="Where they come from" note="the same owner, holder and maker together: a leak is a large number"><${Table} table=${view.sources} live empty=${html`<${Empty} title="No references">Values that <code>rpc.remote</code> makes will be here, with their holders.<//>`} /><//>
    ${view.largest.rows.length > 0 && html`<${Card} title="The largest"><${Table} table=${view.largest} /><//>`}`;
}

function Reference({ view }) {
  const each = view.reference;
  return html`<h1>Reference <span class="mono">${view.id}</span></h1>
    ${each
      ? html`<${Card}><${Facts} pairs=${[["Owner", html`<a href=${address("workers", each.owner)}>${each.owner}</a>`], ["Type", each.type], ["State", html`<${State} value=${each.state} />`], ["Size", bytes(each.bytes)], ["Device", each.device], ["Age", seconds(each.age)],
          ["Made by", each.function && html`<a class="mono" href=${address("functions", each.function)}>${each.function}</a>`], ["Created at", each.site], ["Holders that the owner knows", each.holders.map((name) => html`<a href=${address("workers", name)}>${name}</a> `)], ["On their way", count(each.unconfirmed)]]} /><//>`
      : html`<${Empty} title="Its owner does not have it">It was freed, or the owner did not answer.<//>`}
    <${Card} title="Who holds it"><${Table} table=${view.held} empty=${html`<${Empty} title="No worker that answered holds it">The owner frees it when its last holder has let go.<//>`} /><//>`;
}

function Links({ view }) {
  const place = useContext(Place);
  if (view.ways) return html`<${Pair} view=${view} />`;
  if (!view.links.total) return html`<h1>Links</h1><${Empty} title="No links">Workers connect when they first have something to say to each other.<//>`;
  return html`<h1>Links</h1>
    <div class="tools"><${Choice} label="Colour" value=${view.metric} options=${view.metrics.map((key) => [key, METRICS[key][0]])} onChange=${(metric) => place.setQuery({ metric })} />${place.query.block && html`<button onClick=${() => place.setQuery({ block: "" })}>All workers</button>`}</div>
    <${Card} title=${METRICS[view.metric][0]} note="a row for each sender, a column for each receiver"><${Matrix} matrix=${view.matrix} metric=${view.metric} query=${place.setQuery} /><//>
    <${Card} title="All links" note="trouble first"><${Table} table=${view.links} live /><//>`;
}

function Pair({ view }) {
  const [one] = view.ways;
  return html`<h1><a href=${address("workers", one.from)}>${one.from}</a> ↔ <a href=${address("workers", one.to)}>${one.to}</a></h1>
    ${view.ways.map((way) => html`<${Card} key=${way.from} title=${`${way.from} → ${way.to}`} note=${way.link ? way.link.transport : ""}>${way.link
      ? html`<${Facts} pairs=${[["Peer is", html`<${State} value=${way.link.state} />`], ["Why", way.link.reason], ["Sent", `${bytes(way.link.sent)} in ${plural(way.messages_sent, "message")}`], ["Received", `${bytes(way.link.received)} in ${plural(way.messages_received, "message")}`], ["Round trip", seconds(way.link.round_trip)], ["Queued", bytes(way.link.queued)], ["Unacknowledged", count(way.link.messages)], ["Reconnects", count(way.link.reconnects)], ["Memory lent", bytes(way.link.lent)], ["Flow control", way.link.paused]]} />
        ${way.curves && html`<div class="columns"><div><h3>Bytes a second</h3><${Chart} data=${way.curves} lines=${[["sent", "sent", "blue"], ["received", "received", "amber"]]} kind="bytes" label="Bytes a second over time" /></div><div><h3>Round trip</h3><${Chart} data=${way.curves} lines=${[["round_trip", "round trip", "violet"]]} kind="seconds" label="Round trip over time" /></div></div>`}`
      : html`<${Empty} title="No link this way">${way.from} has no connection to ${way.to}, or did not answer.<//>`}<//>`)}`;
}

function Gradients({ view }) {
  if (view.key) return html`<${Pass} view=${view} />`;
  return html`<h1>Backward passes</h1><${Card}><${Table} table=${view.passes} live empty=${html`<${Empty} title="No backward pass is under way">While <code>autograd.backward</code> runs, its phase, its workers and the gradients they owe each other are here.<//>`} /><//>`;
}

function Pass({ view }) {
  if (!view.found) return html`<h1>Backward pass <span class="mono">${view.key}</span></h1><${Empty} title="This pass is over">Or the workers in it did not answer.<//>`;
  const names = [...new Set(view.owed.flatMap(([from, to]) => [from, to]))];
  const owed = new Map(view.owed.map(([from, to, number]) => [`${from}\n${to}`, number]));
  return html`<h1>Backward pass <span class="mono">${view.key}</span></h1>
    <${Card}><${Facts} pairs=${[["Started by", html`<a href=${address("workers", view.summary.started_by)}>${view.summary.started_by}</a>`], ["Age", seconds(view.summary.age)], ["Phase", view.summary.phase], ["Gradients owed", count(view.summary.owed)]]} /><//>
    ${names.length > 0 && names.length <= 24 && html`<${Card} title="Gradients on their way" note="a row for each worker that has to send"><div class="scroll"><table class="grid"><thead><tr><th></th>${names.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead><tbody>${names.map((from) => html`<tr><th scope="row">${from}</th>${names.map((to) => { const number = owed.get(`${from}\n${to}`); return html`<td class=${number ? "on" : ""}>${number || ""}</td>`; })}</tr>`)}</tbody></table></div><//>`}
    <${Card} title="Workers"><${Table} table=${view.parts} /><//>`;
}

function Events({ view }) {
  const place = useContext(Place);
  return html`<h1>Events</h1>
    <div class="tools"><${Choice} label="Which" value=${view.show} options=${[["group", "Group"], ["failed", "Failed calls"], ["all", "All"]]} onChange=${(show) => place.setQuery({ show: show === "group" ? "" : show })} />
      ${Object.entries(view.counts).map(([kind, number]) => html`<span class="pill">${kind} ${count(number)}</span>`)}</div>
    <${Card}><${Table} table=${view.events} live empty=${html`<${Empty} title="Nothing has happened">Since this dashboard has been watching, and as far back as the workers remember.<//>`} /><//>`;
}

function Stacks({ view }) {
  if (view.number) return html`<${Thread} view=${view} />`;
  const place = useContext(Place);
  return html`<h1>Stacks${view.worker ? html` of <a href=${address("workers", view.worker)}>${view.worker}</a>` : ""}</h1>
    <div class="tools"><input class="filter" type="search" placeholder="Filter ( / )" aria-label="Filter" value=${place.query.filter || ""} onChange=${(event) => place.setQuery({ filter: event.currentTarget.value })} /><span class="note">${plural(view.threads, "thread")}; equal stacks stand together, those at work first</span></div>
    ${view.missing.map((each) => html`<${Card} key=${each.worker} title=${each.worker} note=${`${each.state}; written by its signal handler`}><pre>${each.stacks}</pre><//>`)}
    ${view.groups.map((group) => html`<${Card} key=${group.stack.join("\n")} title=${group.count > 1 ? plural(group.count, "thread") : `${group.threads[0].name} of ${group.threads[0].worker}`}><${Does} threads=${group.threads} more=${group.count - group.threads.length} /><${Stack} lines=${group.stack} /><//>`)}
    ${!view.groups.length && html`<${Empty} title="No threads">No worker answered, or none has a thread with these words.<//>`}
    ${view.left_out > 0 && html`<p class="note">${plural(view.left_out, "other stack")} not shown: filter for what you look for.</p>`}`;
}

function Does({ threads, more = 0 }) {
  return html`<ul class="lines">${threads.map((thread) => html`<li><a href=${address("stacks", thread.worker, thread.id)}>${thread.worker} ${thread.name}</a> <span class="note">${thread.role}</span>${thread.serving && html` serves <a class="mono" href=${address("calls", thread.serving)}>${thread.serving}</a>`}${thread.waits.map((wait) => html`, waits for ${wait.call ? html`<a href=${address("calls", wait.call)}>${wait.text}</a>` : wait.text}${wait.age == null ? "" : ` (${seconds(wait.age)})`}${wait.holder == null || wait.kind !== "lock" ? "" : html`, which <a href=${address("stacks", thread.worker, wait.holder)}>thread ${wait.holder}</a> holds`}`)}</li>`)}${more > 0 && html`<li class="note">and ${count(more)} more</li>`}</ul>`;
}

function Thread({ view }) {
  const { thread } = view;
  return html`<h1>Thread <span class="mono">${thread ? thread.name : view.number}</span> of <a href=${address("workers", view.worker)}>${view.worker}</a></h1>
    ${thread ? html`<${Card}><${Does} threads=${[thread]} /><${Stack} lines=${thread.stack} /><//>` : html`<${Empty} title="There is no such thread">It has ended, or its worker did not answer.<//>`}`;
}

const MEASURES = { call: "Whole call, as its caller sees it", queue: "Waiting for a thread of the callee", run: "Running at the callee" };

function Functions({ view }) {
  if (view.function) return html`<${Function} view=${view} />`;
  return html`<h1>Functions</h1><${Card}><${Table} table=${view.functions} live empty=${html`<${Empty} title="No call has ended yet">Each function that is called gets a line here, with its histograms.<//>`} /><//>`;
}

function Function({ view }) {
  return html`<h1><span class="mono">${view.function}</span></h1>
    ${view.curves && html`<div class="columns"><${Card} title="Calls a second"><${Chart} data=${view.curves} lines=${[["rate", "calls", "blue"], ["failed", "failed", "bad"]]} label="Calls a second over time" /><//><${Card} title="Latency"><${Chart} data=${view.curves} lines=${LATENCY} kind="seconds" label="Latency over time" /><//></div>`}
    <div class="columns three">${Object.entries(view.measures).map(([measure, found]) => html`<${Card} key=${measure} title=${MEASURES[measure]} note=${plural(found.count, "call")}><${Histogram} ...${found} marks=${[["50 %", found.p50], ["99 %", found.p99]]} label=${`How long: ${MEASURES[measure]}`} />
      <${Facts} pairs=${[["Mean", seconds(found.mean)], ["Median", seconds(found.p50)], ["90 %", seconds(found.p90)], ["99 %", seconds(found.p99)], ["Longest", seconds(found.longest)], ["Failed", found.failed ? count(found.failed) : ""]]} /><//>`)}</div>
    ${!Object.keys(view.measures).length && html`<${Empty} title="No call of it has ended">Or no worker that answered knows it.<//>`}
    ${view.calls.rows.length > 0 && html`<${Card} title="Under way"><${Table} table=${view.calls} /><//>`}
    ${view.pairs.rows.length > 0 && html`<${Card} title="By worker and peer" note="the slowest first"><${Table} table=${view.pairs} live /><//>`}`;
}

function Worker({ view }) {
  if (view.workers) return html`<h1>Workers</h1><${Card}><ul class="lines">${view.workers.map(([name, state]) => html`<li><a href=${address("workers", name)}>${name}</a> <${State} value=${state} /></li>`)}</ul><//>`;
  const { row, facts, missing, memory, pool } = view;
  if (!row) return html`<h1>${view.worker}</h1><${Empty} title="The group has no such worker">It may have left long ago.<//>`;
  return html`<h1>${view.worker} <${State} value=${row.state} /></h1>
    ${row.reason && html`<p class="sentence ${missing ? "bad" : ""}">${view.worker} is ${row.state}: ${row.reason}.</p>`}
    ${missing?.stacks && html`<${Card} title="Its stacks" note="written by its signal handler"><pre>${missing.stacks}</pre><//>`}
    ${facts && html`<div class="tiles"><${Tile} label="Served /s" value=${rate(row.served)} /><${Tile} label="Pool" value=${`${pool.running}/${pool.limit}`} note=${`${count(pool.queued)} queued, ${plural(pool.coroutines, "coroutine")}`} bad=${row.state === "busy"} /><${Tile} label="CPU" value=${percent(row.cpu)} /><${Tile} label="Memory" value=${bytes(facts.resident)} /><${Tile} label="References" value=${`${count(view.owned)} / ${count(view.held)}`} note="owned / held" href="/references" /><${Tile} label="Threads" value=${count(view.threads.length)} href=${address("stacks", view.worker)} /></div>
      <${Card}><${Facts} pairs=${[["Rank", facts.rank], ["Host", facts.host], ["PID", facts.pid], ["Up", seconds(facts.up)], ["Program", facts.program], ["Versions", Object.entries(facts.versions).map((each) => each.join(" ")).join(", ")], ["Shared memory", `${bytes(memory.shared_own)} own, ${bytes(memory.shared_lent)} lent, ${bytes(memory.shared_borrowed)} borrowed`], ["Message buffers", bytes(memory.buffers)], ["Device memory lent", memory.device_lent ? bytes(memory.device_lent) : ""], ["Waits for the interpreter", facts.interpreter_wait == null ? "" : seconds(facts.interpreter_wait)]]} /><//>
      <div class="columns"><${Card} title="Calls a second"><${Chart} data=${view.curves} lines=${THROUGHPUT} label="Calls a second over time" /><//><${Card} title="Memory"><${Chart} data=${view.curves} lines=${[["resident", "resident", "violet"]]} kind="bytes" label="Memory over time" /><//></div>
      ${view.waits.rows.length > 0 && html`<${Card} title="What it waits for"><${Table} table=${view.waits} /><//>`}
      <${Card} title="Calls it serves"><${Table} table=${view.serves} empty=${html`<${Empty} title="It serves no call now">${""}<//>`} /><//>
      <${Card} title="Calls it makes"><${Table} table=${view.made} empty=${html`<${Empty} title="It waits for no call now">${""}<//>`} /><//>
      <${Card} title="Threads"><${Does} threads=${view.threads} /><//>`}
    ${view.events.rows.length > 0 && html`<${Card} title="Events"><${Table} table=${view.events} /><//>`}`;
}

export const PAGES = {
  overview: Overview, calls: Calls, waiting: Waiting, timeline: TimelinePage, references: References, links: Links,
  gradients: Gradients, events: Events, stacks: Stacks, functions: Functions, workers: Worker,
};
