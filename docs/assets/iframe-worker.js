// Search without a server. Browsers start no workers for pages opened from a disk (file://), so a hidden frame that loads
// the worker's script takes the worker's place, with the part of its interface that the site's search uses.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {  // the second name tells the worker where it runs
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.loaded = new Promise(resolve => frame.addEventListener("load", resolve))
      frame.srcdoc = `<script>
        postMessage = data => parent.postMessage(data, "*")
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(resolve => {
          document.head.append(Object.assign(document.createElement("script"), {src: url, onload: resolve}))
        })), Promise.resolve())
      <\/script><script src="${new URL(url, location)}"><\/script>`
      document.body.append(frame)
      this.frame = frame
      addEventListener("message", event => {
        if (event.source === frame.contentWindow) this.dispatchEvent(new MessageEvent("message", {data: event.data}))
      })
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data})))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
